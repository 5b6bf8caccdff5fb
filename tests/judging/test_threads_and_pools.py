"""Judgments at the same time say what they say one after the other, and signal nothing of the program that asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
from cheating_kernels import CHEATS

from flashinfer_trace.judging import server as server_module
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.server import Server, shared_server
from flashinfer_trace.judging.submission import RunLimits
from flashinfer_trace.judging.verdict import Grade
from flashinfer_trace.sandbox.fork_server import ForkServer, ServerEnded, Service
from flashinfer_trace.sandbox.limits import Failed
from flashinfer_trace.sandbox.process import ConfinedProcess
from flashinfer_trace.sandbox.worker import ReferenceWorker

#: Its judgment is short: 64 of them are made at once.
NORM = "rmsnorm_h128"
HANGS = "def run(hidden_states, weight):\n    while True:\n        pass\n"
DIES = "import os\n\n\ndef run(hidden_states, weight):\n    os.kill(os.getpid(), 9)\n"
HALVES = "def run(hidden_states, weight):\n    return hidden_states / 2\n"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A right kernel, and three that fail in ways that end processes or do not."""
    directory = tmp_path_factory.mktemp("kernels")
    for name, text in (("hangs", HANGS), ("dies", DIES), ("halves", HALVES)):
        (directory / f"{name}.py").write_text(text)
    return [f"{CHEATS}/norms.py:right", *(str(directory / f"{name}.py") for name in ("hangs", "dies", "halves"))]


def judged(kernel: str) -> tuple[object, ...]:
    """The part of a verdict that depends on neither the clock nor the machine."""
    verdict = judge(kernel, NORM, examples=2, seed=7, limits=RunLimits(call=20.0, first_call=0.5))
    failure = verdict.failure
    return verdict.grade, verdict.calls, verdict.cases, verdict.largest, failure and (failure.kind, failure.axes)


@pytest.fixture
def unsignaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Which process groups this process has signaled: none may be its own, every process, or init's."""
    real, groups = os.killpg, []

    def noted(group: int, number: int) -> None:
        groups.append((group, number))
        assert group > 1 and group != os.getpgid(0)
        real(group, number)

    monkeypatch.setattr(os, "killpg", noted)
    yield groups


def test_threads_get_the_verdicts_of_one_after_the_other(kernels: list[str], unsignaled: list[tuple[int, int]]) -> None:
    wanted = [judged(kernel) for kernel in kernels]
    assert [verdict[-1] and verdict[-1][0] for verdict in wanted] == [None, "timed-out", "died", "values"]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(judged, 16 * kernels)) == 16 * wanted
    assert len({group for group, _ in unsignaled}) > len(kernels)


@pytest.mark.parametrize("kind", ["fork", "spawn"])
def test_pools_of_processes_get_them_too(kind: str, kernels: list[str]) -> None:
    """After one judgment here: a forked copy of this process must not talk to its server."""
    kernels = [kernels[0], *3 * [kernels[3]]]  # the wrong one ends at its first call
    wanted = [judged(kernel) for kernel in kernels]
    pool: Executor
    with ProcessPoolExecutor(2, mp_context=get_context(kind)) as pool:
        assert list(pool.map(judged, 16 * kernels, timeout=600)) == 16 * wanted
    assert [judged(kernel) for kernel in kernels] == wanted and shared_server().alive


def test_a_program_ends_although_its_pool_has_copies_of_its_sockets(kernels: list[str]) -> None:
    text = f"""
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from flashinfer_trace.judging import server as server_module
from flashinfer_trace.judging.judge import judge
judge({kernels[0]!r}, {NORM!r}, examples=1)
pool = ProcessPoolExecutor(1, mp_context=get_context("fork"))
print(pool.submit(len, "four").result(), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_a_copy_of_the_process_has_no_server() -> None:
    with Server(fork=True) as server:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                server.begin()
            except ServerEnded:
                status = 7 if not server.alive else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert server.alive and server.end(os.getpid()) == -1, "it ends only processes that it started"


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_no_number_but_that_of_a_process_is_one(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """os.killpg(0) is for the caller's own group."""
    monkeypatch.setattr(ForkServer, "begin", lambda self: (None, pid))
    with Server(fork=True) as server, pytest.raises(Failed, match="is not a process of its own"):
        ConfinedProcess(server)


def test_an_interrupt_between_command_and_answer_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer would be that of another command."""

    def interrupted(self: ForkServer) -> int:
        raise KeyboardInterrupt

    with Server(fork=True) as server:
        monkeypatch.setattr(ForkServer, "_reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            server.begin()
        monkeypatch.undo()
        assert not server.alive
        with pytest.raises(ServerEnded):
            server.begin()
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        with pytest.raises(ServerEnded):
            server.end(process.pid)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_a_kernel_is_not_judged_where_no_server_starts(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SUBMISSIONS", Service("flashinfer_trace.no_such_module", lambda name: True))
    with Server() as server:
        verdict = judge(kernels[0], NORM, server=server)
    assert verdict.grade == Grade.NOT_JUDGED and verdict.failure is not None and verdict.failure.kind == "died"
    assert "has ended; see its error above" in verdict.failure.message


def test_a_worker_of_references_in_each_thread() -> None:
    import flashinfer_trace

    definition = flashinfer_trace.load("rmsnorm_h128")
    inputs = flashinfer_trace.make_inputs(definition, seed=1)

    def outputs(_: int) -> list[float]:
        with ReferenceWorker() as worker:
            return [worker.run(definition, inputs, 0)["output"].float().sum().item() for _ in range(5)]

    wanted = outputs(0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(outputs, range(4))) == 4 * [wanted]
