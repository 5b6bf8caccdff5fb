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

import pytest

from flashinfer_trace.cli.processes import run_in_processes
from flashinfer_trace.cli.runs import Settings
from flashinfer_trace.cli.tasks import find_tasks
from flashinfer_trace.dataset import find_root, load

NAMES = ("rmsnorm_h512", "rmsnorm_h7168", "silu_and_mul_i4096", "gemm_bf16_n512_k512")
SETTINGS = Settings("cpu", 20, 0, None, None, False, None, None)


def found(invoke, *options: str) -> list[dict[str, object]]:
    result = invoke("verify", *NAMES, "--against", "all", "--format", "json", *options)
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)
    return [{key: value for key, value in one.items() if key not in ("seconds", "outputs")} for one in reports]


def test_several_processes_find_what_one_finds(invoke):
    assert found(invoke, "--jobs", "2") == found(invoke, "--jobs", "1")


def test_the_tasks_of_a_process_that_died_have_failed():
    """It is ended as soon as the first of its families is through; another process verifies the others."""
    tasks = find_tasks([load(name) for name in NAMES], find_root(), "oracle", None)
    running = run_in_processes(tasks, SETTINGS, 1, lambda label, done: None)
    first = next(running)
    (process,) = multiprocessing.active_children()
    os.kill(process.pid, signal.SIGKILL)
    rest = list(running)
    assert {report.definition for report in [first, *rest]} == {task.definition.name for task in tasks}
    failed = [report for report in rest if report.status == "failed"]
    assert failed and all("died (exit code -9)" in report.message for report in failed)
    assert len({report.definition.partition("_")[0] for report in failed}) == 1
    assert {report.status for report in [first, *rest] if report not in failed} == {"passed"}
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
