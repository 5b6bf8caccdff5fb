"""Answers of a worker to honest references and their callers, and its messages about mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from whole_dataset import FAMILIES, FIRST

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness import verify as verify_module
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.refusals import raised_by
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.sandbox import protocol, state
from flashinfer_trace.sandbox.confine import LEVELS
from flashinfer_trace.sandbox.limits import Budget
from flashinfer_trace.sandbox.worker import ReferenceFailed, ReferenceLimits, ReferenceWorker

from .conftest import HONEST, PATIENT, definition_of, x


@pytest.mark.parametrize("name", FIRST)
def test_outputs_are_those_of_the_same_reference_here(name: str, worker: ReferenceWorker) -> None:
    twin = Job(FIRST[name], FAMILIES[name]).sized
    for seed in (1, 2):
        inputs = flashinfer_trace.make_inputs(twin, seed=seed)
        here, there = reference_outputs(twin, inputs, seed), reference_outputs(twin, inputs, seed, worker)
        assert list(here) == list(there)
        for name, value in here.items():
            assert value.dtype == there[name].dtype and value.shape == there[name].shape
            assert torch.equal(bits(value), bits(there[name]))


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def test_numbers_strides_and_empty_tensors_cross(worker: ReferenceWorker) -> None:
    source = "def run(x):\n    assert x.stride(0) == 2 and not x.is_contiguous()\n    return x.clone()\n"
    source = source.replace("x.stride(0) == 2 and ", "")
    strided = torch.arange(8.0)[::2]
    assert torch.equal(worker.run(definition_of(source), {"x": strided}, 0)["y"], strided)
    expanded = torch.tensor([5.0]).expand(4)
    assert torch.equal(worker.run(HONEST, {"x": expanded}, 0)["y"], 2 * expanded)
    assert worker.run(HONEST, {"x": torch.zeros(0, 3)}, 0)["y"].shape == (0, 3)
    assert worker.run(HONEST, {"x": 2.5}, 0)["y"] == 5.0
    assert worker.run(HONEST, {"x": -(2**40)}, 0)["y"] == -(2**41)
    number = worker.run(definition_of("def run(x):\n    return not x\n"), {"x": True}, 0)["y"]
    assert number is False
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.int8, torch.float64):
        value = torch.tensor([0, 1, 1, 0]).to(dtype)
        copied = worker.run(definition_of("def run(x):\n    return x.clone()\n"), {"x": value}, 0)["y"]
        assert copied.dtype == dtype and torch.equal(bits(copied), bits(value))


def test_numbers_that_are_given_take_the_place_of_drawn_ones(worker: ReferenceWorker) -> None:
    sampler = definition_of("def run(x):\n    return x + torch.rand(2, 2, dtype=torch.float64)\n", "sampling")
    uniform = torch.tensor([0.25, 0.5, 0.75, 0.0], dtype=torch.float64)
    given = worker.run(sampler, {"x": torch.zeros(2, 2)}, 0, uniform)["y"]
    assert torch.equal(given, uniform.reshape(2, 2))
    assert not torch.equal(worker.run(sampler, {"x": torch.zeros(2, 2)}, 0)["y"], given)


def test_samplers_draw_from_the_seed(worker: ReferenceWorker) -> None:
    sampler = definition_of("def run(x):\n    return x + torch.rand(4)\n", "sampling")
    first, again, other = (worker.run(sampler, x(), seed)["y"] for seed in (1, 1, 2))
    torch.manual_seed(1)
    assert torch.equal(first, x()["x"] + torch.rand(4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_several_threads(worker: ReferenceWorker) -> None:
    with ReferenceWorker(ReferenceLimits(seconds=60, threads=2)) as two:
        big = {"x": torch.ones(512, 512)}
        assert two.run(definition_of("def run(x):\n    return x @ x\n"), big, 0)["y"][3, 4] == 512


def test_what_cannot_cross(worker: ReferenceWorker) -> None:
    with pytest.raises(TypeError, match="a tensor on meta crosses no pipe"):
        worker.run(HONEST, {"x": torch.ones(4, device="meta")}, 0)
    with pytest.raises(TypeError, match="a str crosses no pipe"):
        worker.run(HONEST, {"x": "text"}, 0)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            "def run(x):\n    assert x.shape == (5,), 'five'\n    return x\n",
            "raised",
            r"AssertionError: five \(reference",
        ),
        ("def run(x):\n    return x + 1 / 0\n", "raised", r"ZeroDivisionError: division by zero \(reference line 4\)"),
        ("def run(x):\n    return [x + 1]\n", "outputs", r"run\(\) returned a list"),
        ("def run(x):\n    return None\n", "raised", "a NoneType crosses no pipe"),
        ("def run(x):\n    return torch.ones(2, 2).T\n", "memory-shared", "output y is not contiguous"),
        ("def run(x):\n    return torch.rand(4)\n", "refused", r"torch\.rand is not allowed"),
        ("def run(x:\n", "refused", "the reference is not Python"),
    ],
)
def test_failures_are_named(source: str, kind: str, message: str, worker: ReferenceWorker) -> None:
    with pytest.raises(ReferenceFailed, match=message) as failure:
        worker.run(definition_of(source), x(), 0)
    assert failure.value.kind == kind


def test_outputs_that_share_memory(worker: ReferenceWorker) -> None:
    source = "def run(x):\n    y = x + 1\n    return y, y\n"
    with pytest.raises(ReferenceFailed, match="output z shares memory with output y"):
        worker.run(definition_of(source, outputs=("y", "z")), x(), 0)


def test_the_number_of_outputs(worker: ReferenceWorker) -> None:
    with pytest.raises(InputError, match=r"2 results for the outputs \['y'\]"):
        worker.run(definition_of("def run(x):\n    return x + 1, x + 2\n"), x(), 0)


def test_no_reference_meets_another(worker: ReferenceWorker, unchecked: None) -> None:
    patch = "def run(x):\n    torch.add = None\n    torch.Tensor.__add__ = None\n    return x.clone()\n"
    with pytest.raises(ReferenceFailed, match=r"it replaced torch.*add"):
        worker.run(definition_of(patch), x(), 0)
    plus = definition_of("def run(x):\n    return torch.add(x, 1) + 1\n")
    assert torch.equal(worker.run(plus, x(), 0)["y"], x()["x"] + 2)


def test_a_process_serves_a_reference_at_all_sizes(worker: ReferenceWorker) -> None:
    source = "N = 4\n\n\ndef run(x):\n    assert x.shape == (N,)\n    return 2 * x\n"
    four = definition_of(source)
    five = four.with_const_axes({"n": 5})
    other = definition_of(source.replace("2 * x", "3 * x"))
    with ReferenceWorker(PATIENT) as own:
        processes = []
        for definition, size, factor in ((four, 4, 2), (five, 5, 2), (four, 4, 2), (other, 4, 3)):
            ones = torch.ones(size)
            assert torch.equal(own.run(definition, {"x": ones}, 0)["y"], factor * ones)
            processes.append(own._process._pid)
        with pytest.raises(ReferenceFailed, match="AssertionError"):
            own.run(five, {"x": torch.ones(4)}, 0)
    assert processes[0] == processes[1] == processes[2] != processes[3]


@pytest.mark.parametrize("rows", [4, 4000])
def test_checksums_show_any_changed_bit_and_exchanged_rows(rows: int) -> None:
    value = torch.arange(rows * 8, dtype=torch.int64).view(rows, 8)
    guard = state.InputGuard({"x": value})
    assert guard.changed() == guard.written() == []
    for first, second in ((0, 1), (0, rows - 1), (1, rows // 2)):
        value.data[[first, second]] = value.data[[second, first]]
        assert guard.changed() == ["x"] and guard.written() == []
        value.data[[first, second]] = value.data[[second, first]]
        assert guard.changed() == []
    for place in (0, rows // 2, rows - 1):
        value.data[place, 3] ^= 1 << 40
        assert guard.changed() == ["x"]
        value.data[place, 3] ^= 1 << 40
    value += 0
    assert guard.written() == ["x"] and guard.changed() == []


def test_an_answer_that_nobody_asked_for(worker: ReferenceWorker, unchecked: None) -> None:
    source = """
def run(x):
    state = torch.sys.modules["flashinfer_trace.sandbox.state"]
    state.threading.active_count = lambda: 1
    torch.threading.Timer(0, torch.os.write, (3, b"answer")).start()
    return 2 * x
"""
    found = set()
    for _ in range(3):
        try:
            worker.run(definition_of(source), x(), 0)
        except ReferenceFailed as failure:
            found.add(failure.kind)
    assert found == {"protocol"}


def test_processes_that_are_ended_from_outside_are_replaced() -> None:
    with ReferenceWorker(PATIENT) as worker:
        worker.run(HONEST, x(), 0)
        os.kill(worker._process._pid, signal.SIGKILL)
        with pytest.raises(ReferenceFailed, match="ended by SIGKILL"):
            worker.run(HONEST, x(), 0)
        assert torch.equal(worker.run(HONEST, x(), 0)["y"], 2 * x()["x"])
        assert worker._server is not None
        os.kill(worker._server._pid, signal.SIGKILL)
        with pytest.raises(ReferenceFailed) as failure:
            for _ in range(1000):  # the worker is ended in its turn, a moment later
                worker.run(HONEST, x(), 0)
        assert failure.value.kind == "died"
        assert torch.equal(worker.run(HONEST, x(), 0)["y"], 2 * x()["x"])
        assert worker.level in LEVELS


def test_nothing_survives_the_harness() -> None:
    """A harness that is killed leaves no process behind, not even one that computes forever."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from sandbox.conftest import *\n"
        "w = ReferenceWorker(ReferenceLimits(seconds=600)); w.run(HONEST, x(), 0)\n"
        "print(w._server._pid, w._process._pid, flush=True)\n"
        "w.run(definition_of('def run(x):\\n    while True:\\n        pass\\n'), x(), 0)\n"
    )
    harness = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert harness.stdout is not None
    server = int(harness.stdout.readline().split()[0])
    harness.kill()
    harness.wait()
    harness.stdout.close()
    for _ in range(500):
        if not running(server):
            break
        signal.sigtimedwait([], 0.02)
    assert not running(server)
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == server]


def running(pid: int) -> bool:
    try:
        return state_of(pid) not in ("Z", "X")
    except OSError:
        return False


def state_of(pid: int | str) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def test_verify_reports_a_reference_that_hangs_once(worker: ReferenceWorker) -> None:
    loaded = flashinfer_trace.load("rmsnorm_h128")
    hangs = loaded.reference.replace("    assert", "    while True:\n        pass\n    assert", 1)
    assert hangs != loaded.reference
    definition = Definition.from_dict({**loaded.to_dict(), "reference": hangs})
    with ReferenceWorker(ReferenceLimits(seconds=1.0)) as impatient:
        report = verify(Job(definition, family_of(definition), worker=impatient), examples=5)
    assert report.status == "failed" and report.seconds < 15
    assert "did not answer within 1 s [timed-out]" in report.message and "repeat: flashinfer-trace" in report.message


def slow_norm(seconds: float) -> Definition:
    """RMSNorm that computes for so long before it answers."""
    loaded = flashinfer_trace.load("rmsnorm_h128")
    wait = f"    for _ in range({int(seconds * 1000)}):\n        torch.ones(300_000).cumsum(0)\n"
    source = loaded.reference.replace("    assert", f"{wait}    assert", 1)
    return Definition.from_dict({**loaded.to_dict(), "reference": source})


@pytest.mark.parametrize("own_process", [True, False])
def test_a_reference_that_answers_just_in_time_has_no_time_for_all_cases(own_process: bool) -> None:
    """Each call is within its limit; together they are not. Where no process can be ended, cases are counted."""
    definition = slow_norm(0.2)
    job = Job(definition, family_of(definition))
    with ReferenceWorker(ReferenceLimits(seconds=60.0, case_seconds=0.02)) as impatient:
        if own_process:
            report = verify(replace(job, worker=impatient), examples=5)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("flashinfer_trace.harness.verify.ReferenceLimits", lambda: impatient.limits)
                report = verify(job, examples=5)
    cases = len(job.corners) + 5
    assert report.status == "failed" and report.seconds < 15
    spent = f"rmsnorm_h128: its reference took all of the {cases * 0.02:g} s that it has for {cases} cases"
    assert spent in report.message
    assert "[too-slow]" in report.message and "repeat: flashinfer-trace verify rmsnorm_h128" in report.message


def test_a_budget_ends_a_call_and_is_left_alone_by_others(worker: ReferenceWorker) -> None:
    hangs = definition_of("def run(x):\n    while True:\n        pass\n")
    budget = Budget("stranger", 2, ReferenceLimits(case_seconds=0.2))
    with worker.within(budget):
        assert torch.equal(worker.run(HONEST, x(), 0)["y"], 2 * x()["x"])
        for _ in range(2):  # the second one does not begin
            with pytest.raises(ReferenceFailed, match=r"stranger: its reference took all of the 0\.4 s") as failure:
                worker.run(hangs, x(), 0)
            assert failure.value.kind == "too-slow"
    assert budget.left <= 0
    worker.run(HONEST, x(), 0)
    with pytest.raises(ReferenceFailed, match="too-slow"):
        raised_by(budget.spending().__enter__)


def test_time_that_is_spent_on_shrinking_leaves_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong reference is called again and again for the smallest case that shows it; no call of these is the news."""
    definition = flashinfer_trace.load("rmsnorm_h128")
    real, calls = verify_module.shared_case, []

    def wrong_later(*arguments: Any) -> Any:
        calls.append(arguments)
        shared = real(*arguments)
        if len(calls) > corners + 3:
            shared.failures.append("reference: wrong")
        if len(calls) > corners + 6:
            raise Budget("rmsnorm_h128", 1, ReferenceLimits()).spent()
        return shared

    job = Job(definition, family_of(definition))
    corners = len(job.corners)
    monkeypatch.setattr(verify_module, "shared_case", wrong_later)
    report = verify(job, examples=20)
    assert report.status == "failed" and "reference: wrong" in report.message and "too-slow" not in report.message
    assert len(calls) == corners + 7


@pytest.mark.parametrize(
    "header",
    [
        *(None, [], {"dtype": "float32"}, {"dtype": "object", "shape": []}, {"dtype": "float32", "shape": "4"}),
        *({"dtype": "float32", "shape": [size]} for size in (-1, 1.5, True, "1", 2**62, None, [])),
        {"dtype": "float32", "shape": [2] * 17},
        {"dtype": "float32", "shape": [2**40]},
        {"dtype": "float32", "shape": [2**31, 2**31]},
        {"dtype": "float32", "shape": [0, 2**61, 2**61]},
        {"dtype": "float32", "shape": [2**40], "stride": [0]},
        {"dtype": ["float32"], "shape": [1]},
        {"dtype": "float32", "shape": [4], "stride": [1, 1]},
        {"dtype": "float32", "shape": [4], "stride": [2**50]},
        {"dtype": "float32", "shape": [4], "number": True},
        {"dtype": "bfloat16", "shape": [], "number": True},
    ],
)
def test_headers_are_checked_before_anything_is_read(header: object) -> None:
    def read(_: memoryview) -> None:
        raise AssertionError("bytes were read")

    with pytest.raises(protocol.ProtocolError):
        protocol.read_values([header], read, 1 << 20)
    for values in (None, header, "[]", 3):
        if values != []:
            with pytest.raises(protocol.ProtocolError):
                protocol.read_values(values, read, 1 << 20)
    with pytest.raises(protocol.ProtocolError):
        protocol.read_values([{"dtype": "int8", "shape": [1]}] * 65, read, 1 << 20)


def test_an_exception_leaves_the_process_running(worker: ReferenceWorker) -> None:
    """The harness asks for exceptions, with inputs of wrong sizes: each costs a call, not a process."""
    picky = definition_of("def run(x):\n    assert x.shape == (4,)\n    return 2 * x\n")
    worker.run(picky, x(), 0)
    pid = worker._process._pid
    with pytest.raises(ReferenceFailed) as failure:
        worker.run(picky, {"x": torch.ones(5)}, 0)
    assert (failure.value.kind, failure.value.error) == ("raised", "AssertionError")
    assert torch.equal(worker.run(picky, x(), 0)["y"], 2 * x()["x"])
    assert worker._process._pid == pid
