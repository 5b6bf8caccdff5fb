"""`pytest -m gpu_harness`: the judge passes the real kernels of every family, each by its own stated bounds. A process
that ran a known kernel runs the next one; after a failure, or anybody else's kernel, it ends.
"""

from __future__ import annotations

import os
import signal
import socket

import pytest
import torch
from gpu_libraries import skip_unusable

import flashinfer_trace
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.harness.case import poisoned_outputs
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.process import Failed, Launch
from flashinfer_trace.judging.server import Idle, Server, has_room, library_of
from flashinfer_trace.judging.stopwatch import Stopwatch
from flashinfer_trace.judging.submission import RunLimits, from_path, known

#: Kernels of torch, which run on a CPU.
GEMM = ("gemm_n128_k2048", "torch.matmul[cuBLAS, float32 sums]")
SOFTMAX = ("softmax_temperature_v128256", "torch.softmax")


@pytest.fixture
def own_server():
    with Server(fork=True) as started:
        yield started


def begun(server, name, label):
    definition = flashinfer_trace.load(name)
    request = known(definition, label).request
    return Launch(server, request, list(definition.inputs), list(definition.outputs), "cpu", RunLimits()).start()


def called(process, name):
    """Calls a kernel on a few rows; what it should have given lies close to what it gave."""
    definition = flashinfer_trace.load(name)
    inputs = family_of(definition).inputs_for_axes(definition, dict.fromkeys(definition.var_axes, 2), 1, "cpu")
    answer = process.call(inputs, poisoned_outputs(definition, inputs, 0), 0)
    for output, value in definition.name_outputs(definition.run(**inputs)).items():
        torch.testing.assert_close(answer.outputs[output].float(), value.float(), atol=1e-2, rtol=1e-2)


def test_the_next_known_kernel_runs_in_the_same_process(own_server):
    pids = []
    for name, label in (GEMM, SOFTMAX, GEMM):
        with begun(own_server, name, label) as process:
            pids.append(process._pid)
            called(process, name)
    assert len(set(pids)) == 1


def test_two_at_a_time_have_two_processes(own_server):
    with begun(own_server, *GEMM) as first, begun(own_server, *SOFTMAX) as second:
        assert first._pid != second._pid
        called(first, GEMM[0])
        called(second, SOFTMAX[0])


def test_no_other_kernel_follows_a_failure_or_one_that_was_ended(own_server):
    with begun(own_server, *GEMM) as first, pytest.raises(Failed):
        first.call({"A": torch.ones(2, 3)}, {"C": torch.ones(2, 2)}, 0)
    with begun(own_server, *GEMM) as second:
        assert second._pid != first._pid
        second.end()
    with begun(own_server, *GEMM) as third:
        assert third._pid != second._pid


def test_none_waits_where_memory_is_short(own_server, monkeypatch):
    free = {"cuda:0": 49, "cuda:1": 50}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device], 100))
    assert [has_room(device) for device in ("cuda:0", "cuda:1", "cpu")] == [False, True, True]
    monkeypatch.setattr("flashinfer_trace.judging.process.has_room", lambda device: has_room("cuda:0"))
    with begun(own_server, *GEMM) as first:
        called(first, GEMM[0])
    with pytest.raises(ProcessLookupError):
        os.killpg(first._pid, 0)
    with begun(own_server, *GEMM) as second:
        assert second._pid != first._pid
        called(second, GEMM[0])


def test_one_that_ended_while_it_waited_is_replaced(own_server):
    with begun(own_server, *GEMM) as first:
        pass
    os.kill(first._pid, signal.SIGKILL)
    with begun(own_server, *GEMM) as second:
        assert second._pid != first._pid
        called(second, GEMM[0])


def test_a_submission_gets_a_process_of_its_own(own_server, tmp_path):
    (tmp_path / "mine.py").write_text("def run(x, w):\n    return x\n")
    mine = from_path(str(tmp_path / "mine.py")).request
    pids = []
    with begun(own_server, *GEMM) as process:
        pids.append(process._pid)
    for _ in range(2):
        with Launch(own_server, mine, ["x", "w"], ["y"], "cpu", RunLimits()).start() as process:
            pids.append(process._pid)
    with begun(own_server, *GEMM) as process:
        assert process._pid == pids[0]
    assert len(set(pids)) == 3


def test_one_that_has_imported_the_library_is_preferred(own_server):
    pipes = socket.socketpair()
    both = [
        Idle(pipe, number, "cuda", frozenset({name}))
        for number, (pipe, name) in enumerate(zip(pipes, "ab", strict=True))
    ]
    for wanted, found in (("a", 0), ("b", 1)):
        for one in both:
            own_server.keep(one)
        assert own_server.take(wanted, "cpu") is None and own_server.take("", "cuda") is None
        assert own_server.take(wanted, "cuda") is both[found]
        assert own_server.take("c", "cuda") is both[1 - found] and own_server.take("c", "cuda") is None
    for pipe in pipes:
        pipe.close()
    assert library_of({"kind": "known", "kernel": "sglang.srt.a[b.c]"}) == "sglang"
    assert library_of({"kind": "file", "kernel": "sglang.srt.a"}) == ""


class Base:
    def plan(self):
        return "plan"

    def run(self):
        return "run"


class Derived(Base):
    def run(self):
        return f"derived {super().run()}"


def test_phases_are_those_of_one_class_only():
    """A class that inherits its methods, after its base was watched, must not have them timed twice."""
    own = dict(vars(Base)), dict(vars(Derived))
    watch = Stopwatch("cpu")
    for name in ("Base", "Derived"):
        watch.watch_phases(f"{__name__}.{name}")
        found = globals()[name]()
        watch.take_phases()
        assert found.plan() == "plan" and found.run().endswith("run")
        phases, late = watch.take_phases()
        assert {phase: [each() > 0 for each in calls] for phase, calls in phases.items()} == {
            "plan": [True],
            "run": [True],
        }
        assert not late and watch.take_phases() == ({}, False)
        watch.watch_no_phases()
    assert (dict(vars(Base)), dict(vars(Derived))) == own


def kernels_of_each_family():
    """Each kernel of each family, with the Definition of the smallest weights that it computes."""
    found = {family.name: {} for family in all_families()}
    for definition in sorted(flashinfer_trace.definitions(), key=lambda one: (input_bytes(one), one.name)):
        family = family_of(definition)
        for kernel in family.kernels_of(definition):
            found[family.name].setdefault(kernel.label, (definition, kernel))
    return found


KERNELS = kernels_of_each_family()
#: Those with large weights come first, and do not keep everybody waiting at the end.
PAIRS = [
    pytest.param(definition, kernel, id=f"{definition.name}-{kernel.label}")
    for definition, kernel in sorted(
        (pair for pairs in KERNELS.values() for pair in pairs.values()),
        key=lambda pair: (-input_bytes(pair[0]), pair[0].name),
    )
]
#: Drawn cases; fewer of Definitions with large weights, which take seconds each.
EXAMPLES, LARGE, FEW = 10, 256 << 20, 3

#: Kernels that are wrong on some inputs (findings/kernels.json), and the code of their verdict.
DEFECTS = {"sgl_kernel.moe_align_block_size": "outside"}


@pytest.mark.gpu_harness
@pytest.mark.parametrize(("definition", "kernel"), PAIRS)
def test_a_real_kernel_passes(definition, kernel, cuda_device, server, request, recorded):
    import torch

    skip_unusable(kernel, torch.cuda.get_device_capability(cuda_device), request.config.getoption("--require-gpu"))
    examples = FEW if input_bytes(definition) > LARGE else EXAMPLES
    submission, options = known(definition, kernel.label), {"device": cuda_device, "examples": examples}
    verdict = recorded("kernels", kernel.label, lambda: judge(submission, definition, server=server, **options))
    if not verdict.passed and kernel.label in DEFECTS:
        assert verdict.failure.kind == DEFECTS[kernel.label], str(verdict)
        pytest.xfail(f"{kernel.label}: findings/kernels.json")
    assert verdict.passed, str(verdict)
    assert verdict.grade == "reference-grade" or verdict.alike == [kernel.label], str(verdict)


def test_every_kernel_is_judged():
    """Each of them computes some Definition of its family."""
    for family in all_families():
        assert KERNELS[family.name].keys() == {kernel.label for kernel in family.kernels} != set(), family.name
