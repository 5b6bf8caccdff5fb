"""`flashinfer-trace verify --jobs`: the same reports from several processes, also if one of them dies."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from made_up_evidence import small_dataset

from flashinfer_trace.cli import processes
from flashinfer_trace.cli.options import CPU_JOBS, GPU_JOBS, SHARED_FROM, usual_jobs
from flashinfer_trace.cli.processes import Answers, Queue, memory_of_weights, run_in_processes
from flashinfer_trace.cli.runs import Settings
from flashinfer_trace.cli.tasks import find_tasks
from flashinfer_trace.dataset.store import find_root, load
from flashinfer_trace.harness.verify import Report

GIB = 1 << 30
NAMES = ("rmsnorm_h512", "rmsnorm_h7168", "silu_and_mul_i4096", "gemm_bf16_n512_k512")
SETTINGS = Settings("cpu", 20, 0, None, None, False, None, None)
ON_GPUS = Settings("cuda", 20, 0, None, None, False, None, None)


def found(invoke, *options: str) -> list[dict[str, object]]:
    """The reports without the times, in one order."""
    result = invoke("verify", *NAMES, "--against", "all", "--format", "json", *options)
    assert result.exit_code == 0, result.output
    reports = sorted(json.loads(result.stdout), key=lambda one: (one["definition"], one["target"]))
    return [{key: value for key, value in one.items() if key not in ("seconds", "outputs")} for one in reports]


def test_several_processes_find_what_one_finds(invoke):
    assert found(invoke, "--jobs", "2") == found(invoke, "--jobs", "1")


def test_what_a_process_that_died_was_at_has_failed():
    """It is ended after its first Definition: only the one that it was at has failed, another process does the rest."""
    tasks = find_tasks([load(name) for name in NAMES], find_root(), "oracle", None)
    running = run_in_processes(tasks, SETTINGS, 1)
    first = next(running)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    rest = list(running)
    assert {report.definition for report in [first, *rest]} == {task.definition.name for task in tasks}
    failed = [report for report in rest if report.status == "failed"]
    assert len(failed) == 1 and "died (exit code -9)" in failed[0].message
    assert {report.status for report in [first, *rest] if report not in failed} == {"passed"}
    assert multiprocessing.active_children() == []


def test_what_does_not_answer_in_time_has_failed_and_stops_nothing_else(monkeypatch):
    """As if a kernel hung: the process is stopped after its first family; another one verifies the others."""
    tasks = find_tasks([load(name) for name in NAMES], find_root(), "oracle", None)
    running = run_in_processes(tasks, SETTINGS, 1)
    reports = [next(running)]
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGSTOP)
    usual = processes.ANSWERS_WITHIN
    monkeypatch.setattr(processes, "ANSWERS_WITHIN", 0.1)
    for report in running:
        reports.append(report)
        if report.status == "failed":
            monkeypatch.setattr(processes, "ANSWERS_WITHIN", usual)
    assert len(reports) == len(tasks)
    failed = [report for report in reports if report.status == "failed"]
    assert failed and all("did not answer within 0.1 s: a kernel hangs" in report.message for report in failed)
    assert len({report.definition.partition("_")[0] for report in failed}) == 1
    assert {report.status for report in reports if report not in failed} == {"passed"}
    assert multiprocessing.active_children() == []


def test_what_another_process_cannot_read_is_named(tmp_path):
    """As if the checkout changed during a long run."""
    root = small_dataset(tmp_path, find_root(), "rmsnorm_h512", "gemm_bf16_n512_k512")
    tasks = find_tasks([load(name, root) for name in ("rmsnorm_h512", "gemm_bf16_n512_k512")], root, "oracle", None)
    (root / "schema" / "naming.json").unlink()
    reports = list(run_in_processes(tasks, SETTINGS, 1))
    assert {report.definition for report in reports} == {"rmsnorm_h512", "gemm_bf16_n512_k512"}
    for report in reports:
        assert report.status == "failed"
        assert (
            f"it could not be verified: NamingError: {root / 'schema' / 'naming.json'}: cannot be read"
            in report.message
        )


class OnGpu:
    """Stands in for a process with a GPU: what it answers to a Definition is made up, by name.

    A message that ends with ``unusable`` says that the process cannot go on. After a Definition of `keeping`, it holds
    so many bytes of the GPU's memory.
    """

    started: ClassVar[list[OnGpu]] = []
    messages: ClassVar[dict[str, list[str]]] = {}
    keeping: ClassVar[dict[str, int]] = {}

    def __init__(self, device: str) -> None:
        self.device, self.work, self.done, self.kept, self.left = device, None, [], 0, []
        self.connection, self._answers = multiprocessing.Pipe(duplex=False)
        self.started.append(self)

    def seconds_left(self) -> float:
        return 1.0

    def begin(self, work, settings) -> None:
        self.work = work
        ((task,),) = work.group
        name = task.definition.name
        message = self.messages[name].pop(0) if self.messages.get(name) else ""
        report = Report(name, task.target, self.device, "failed" if message else "passed", message=message)
        self.done.append(name)
        self.kept = self.keeping.get(name, 0)
        self._answers.send(Answers([(report, None)], usable=not message.endswith("unusable"), kept=self.kept))

    def answers(self):
        (tasks,), self.work = self.work.group, None
        return tasks, self.connection.recv()

    def finish(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def on_gpus(
    monkeypatch, jobs: int, gpus: int, memory: float = 80 * GIB, **messages: list[str]
) -> tuple[dict[str, Report], list[OnGpu]]:
    """The report of each Definition, and the processes that were started."""
    monkeypatch.setattr(processes, "_Helper", OnGpu)
    monkeypatch.setattr(processes, "memory_of", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    OnGpu.started, OnGpu.messages = [], messages
    tasks = find_tasks([load(name) for name in NAMES], find_root(), "oracle", None)
    reports = list(run_in_processes(tasks, ON_GPUS, jobs))
    assert len(reports) == len(NAMES)
    return {report.definition: report for report in reports}, OnGpu.started


def test_processes_share_all_gpus(monkeypatch):
    reports, started = on_gpus(monkeypatch, 4, 2)
    assert [one.device for one in started] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert {report.status for report in reports.values()} == {"passed"}


def test_what_leaves_a_gpu_unusable_takes_no_other_definition_with_it(monkeypatch):
    reports, started = on_gpus(monkeypatch, 1, 1, rmsnorm_h512=["its context is unusable"])
    done = [name for one in started for name in one.done]
    assert len(started) == 2 and started[0].done[-1] == "rmsnorm_h512" and sorted(done) == sorted(NAMES)
    assert [name for name, report in reports.items() if report.status == "failed"] == ["rmsnorm_h512"]


@pytest.mark.parametrize(("kept", "replaced"), [(41 * GIB, True), (39 * GIB, False)])
def test_a_process_that_keeps_more_than_half_of_its_share_of_a_gpu_is_replaced(monkeypatch, kept, replaced):
    monkeypatch.setattr(OnGpu, "keeping", {"rmsnorm_h512": kept})
    reports, started = on_gpus(monkeypatch, 1, 1, 80 * GIB)
    assert {report.status for report in reports.values()} == {"passed"} and len(started) == 1 + replaced
    assert (started[0].done[-1] == "rmsnorm_h512") == replaced


@pytest.mark.parametrize(
    ("messages", "jobs", "memory", "runs", "status"),
    [
        (["CUDA out of memory"], 2, 80, 2, "passed"),
        (["CUDA out of memory"] * 2, 2, 80, 3, "passed"),
        (["CUDA out of memory"] * 2, 2, 5, 2, "failed"),
        (["CUDA out of memory"], 1, 80, 1, "failed"),
        (["worst error is 2 x its bound"], 2, 80, 1, "failed"),
    ],
)
def test_what_lacks_memory_beside_others_is_verified_again_with_more(monkeypatch, messages, jobs, memory, runs, status):
    """It needs 3 GiB, it is thought; after that 6, then 12, up to all of the GPU's."""
    reports, started = on_gpus(monkeypatch, jobs, 1, memory * GIB, rmsnorm_h512=list(messages))
    assert reports["rmsnorm_h512"].status == status
    assert sum(one.done.count("rmsnorm_h512") for one in started) == runs


def test_the_memory_of_weights():
    small, large = (memory_of_weights(load(name)) for name in ("rmsnorm_h512", "gemm_bf16_n106496_k16384"))
    assert small < GIB / 1000 and 48 * GIB < large < 64 * GIB


def queue_of(*names: str, memory: float) -> Queue:
    tasks = find_tasks([load(name) for name in names], find_root(), "oracle", None)
    return Queue([[[task]] for task in tasks], {"cuda:0": memory * GIB})


def names_taken(queue: Queue, count: int) -> list[str]:
    """The Definitions that start together, at most count of them."""
    taken = []
    while len(taken) < count and (work := queue.take("cuda:0", taken)):
        taken.append(work)
    return [work.group[0][0].definition.name for work in taken]


@pytest.mark.parametrize(("memory", "count"), [(80, 3), (8, 2), (5, 1), (1, 1)])
def test_a_definition_waits_until_its_gpu_has_room(memory, count):
    """Each needs about 3 GiB; one is begun in any case."""
    assert len(names_taken(queue_of(*NAMES[:3], memory=memory), 3)) == count


def test_what_processes_keep_is_no_room():
    queue = queue_of(*NAMES[:2], memory=8)
    first = queue.take("cuda:0", [])
    assert queue.take("cuda:0", [first], kept=3 * GIB) is None
    assert queue.take("cuda:0", [first], kept=1 * GIB) is not None


def test_large_weights_go_first_and_small_ones_beside_them():
    names = "rmsnorm_h512", "gemm_bf16_n106496_k16384", "gemm_bf16_n128256_k16384", "silu_and_mul_i4096"
    assert names_taken(queue_of(*names, memory=80), 4) == [names[2], names[0], names[3]]


def test_what_a_definition_needed_is_expected_of_its_family():
    queue = queue_of("rmsnorm_h512", "rmsnorm_h7168", "silu_and_mul_i4096", memory=16)
    first = queue.take("cuda:0", [])
    queue.learn(first, 10 * GIB)
    assert queue.take("cuda:0", [first]).family == "silu_and_mul"
    assert queue.take("cuda:0", [first]) is None
    assert queue.take("cuda:0", []).family == "rmsnorm"


def test_weights_that_needed_more_than_expected_make_those_of_their_family_wait():
    """Of about 67 and 55 GiB, the first is found to need 1.5 times as much, and so is the second."""
    queue = queue_of("gemm_bf16_n106496_k16384", "gemm_bf16_n128256_k16384", "rmsnorm_h512", memory=175)
    first = queue.take("cuda:0", [])
    queue.learn(first, first.weights * 3 // 2)
    assert [queue.take("cuda:0", [first]).family, queue.take("cuda:0", [first])] == ["rmsnorm", None]


@pytest.mark.parametrize(
    ("definitions", "gpus", "processors", "jobs"),
    [
        (SHARED_FROM - 1, 2, 64, 1),
        (SHARED_FROM, 0, 64, CPU_JOBS),
        (SHARED_FROM, 1, 64, GPU_JOBS),
        (SHARED_FROM, 2, 64, 2 * GPU_JOBS),
        (SHARED_FROM, 2, 3, 3),
    ],
)
def test_the_usual_number_of_processes(monkeypatch, definitions, gpus, processors, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors), raising=False)
    assert usual_jobs(definitions, gpus) == jobs


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="holds interrupts back through pthread_sigmask")
def test_an_interrupt_while_processes_are_ended_leaves_none(monkeypatch):
    tasks = find_tasks([load(name) for name in NAMES], find_root(), "oracle", None)
    running = run_in_processes(tasks, SETTINGS, 2)
    next(running)
    assert len(multiprocessing.active_children()) == 2
    kill = processes._Helper.kill

    def interrupted(helper):
        os.kill(os.getpid(), signal.SIGINT)
        kill(helper)

    monkeypatch.setattr(processes._Helper, "kill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.close()
    assert multiprocessing.active_children() == []


def members(group: int) -> list[str]:
    """The processes of a group that run: name and state of each."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = file.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(f"{name}) {state}")
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes through /proc")
def test_an_interrupt_ends_all_processes(tmp_path):
    # A shell without job control has what it starts in the background ignore interrupts, these tests among them.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heeding}; from flashinfer_trace.cli import main; main()"
    command = [sys.executable, "-c", program, "verify", "--jobs", "2"]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(members(running.pid)) < 4 and time.monotonic() < deadline:  # the first, two that verify, and a tracker
        time.sleep(0.1)
    assert len(members(running.pid)) >= 4, "the processes have not started"
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(timeout=60) == 130
    assert "interrupted" in (tmp_path / "log").read_text()
    deadline = time.monotonic() + 10
    while members(running.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members(running.pid) == []


def test_jobs_are_for_whole_runs(invoke):
    result = invoke("verify", "rmsnorm_h512", "--jobs", "2", "--axes", "batch_size=3")
    assert result.exit_code == 2 and "--jobs is for whole runs" in result.stderr
