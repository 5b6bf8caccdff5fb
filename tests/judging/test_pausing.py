"""A submission's process runs while it is called, and not while others are timed or inputs are filled in."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from flashinfer_trace.judging.process import Failed, Launch, SubmissionProcess, Timing
from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.submission import RunLimits, from_path

#: Counts milliseconds on a thread, and in a child, and returns how many each has seen.
COUNTING = """
import os, threading, time
import torch

seen = torch.zeros(2, dtype=torch.int64).share_memory_()

def count(place):
    while True:
        seen[place] += 1
        time.sleep(0.001)

if os.fork() == 0:
    count(1)
threading.Thread(target=count, args=(0,), daemon=True).start()

def run(x):
    return seen.clone()
"""
INPUTS, POISONED = {"x": torch.ones(2)}, {"y": torch.zeros(2, dtype=torch.int64)}
#: Seconds in which a thread that runs counts some hundreds.
WHILE = 0.6


@pytest.fixture
def started(tmp_path, server):
    """Starts a process, by default one that counts, on a server."""

    def start(text: str = COUNTING, own: Server = server) -> SubmissionProcess:
        (tmp_path / "mine.py").write_text(text)
        request = from_path(str(tmp_path / "mine.py")).request
        return Launch(own, request, list(INPUTS), list(POISONED), "cpu", RunLimits(call=WHILE / 2)).start()

    return start


def counted(process: SubmissionProcess) -> torch.Tensor:
    return process.call(INPUTS, POISONED, 0).outputs["y"]


QUIET = "import torch\n\n\ndef run(x):\n    return torch.ones(2, dtype=torch.int64)\n"


def gone(pid: int) -> bool:
    """Whether a process has ended, on Linux."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_neither_threads_nor_children_run_while_a_rival_is_timed(started):
    with started() as process, started() as rival:
        first = counted(rival)
        counted(process)
        until = time.monotonic() + WHILE
        while time.monotonic() < until:
            process.timed(INPUTS, POISONED, 0, Timing(repeats=3))
        assert (counted(rival) - first).max() < 100, "and it answers in less time than it was stopped"


def test_they_count_while_they_run(started):
    with started() as process:
        first = counted(process)
        os.killpg(process._pid, signal.SIGCONT)
        time.sleep(WHILE)
        assert (counted(process) - first).min() > 100


def test_one_that_is_stopped_can_be_ended(started):
    process = started(QUIET)
    counted(process)
    process.end()
    with pytest.raises(ProcessLookupError):
        os.killpg(process._pid, 0)


def test_one_that_died_while_it_was_stopped_has_failed(started):
    with started(QUIET) as process:
        counted(process)
        os.kill(process._pid, signal.SIGKILL)
        with pytest.raises(Failed, match="ended by SIGKILL"):
            counted(process)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process does not end with its parent")
def test_one_that_is_stopped_ends_with_the_server(started):
    with Server(fork=True) as own, started(QUIET, own) as process:
        counted(process)
        os.kill(own._pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while not gone(process._pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert gone(process._pid)
