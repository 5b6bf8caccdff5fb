"""Runs the tasks of `verify` in several processes of this machine. Imports torch.

Not with concurrent.futures: in Python before 3.12, its pool waits forever for a thread that writes more to a process
than a pipe holds if that process has died (https://github.com/python/cpython/issues/94777).
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait

import click

from flashinfer_trace.cli.runs import Settings, by_family
from flashinfer_trace.cli.shipments import Answer, Shipment, received, reference_process, run_shipment, shipment
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.isolation.confine import STRONGEST
from flashinfer_trace.isolation.processes import available

__all__ = ["run_in_processes"]

#: Seconds that a process without work may take to end.
PATIENCE = 5.0

#: The tasks of one family, those of each Definition together.
Group = Sequence[Sequence[Task]]

#: What a process answers: of each shipment, the answers; and how references were isolated.
Answers = tuple[list[list[Answer]], str]


def run_in_processes(
    tasks: Sequence[Task], settings: Settings, jobs: int, advance: Callable[[str, bool], None]
) -> Iterator[Report]:
    """Yields the report of each task as it comes, and records what it proves if asked for.

    The Definitions of one family go to one process, because many of them have the same small twin. If a process dies,
    the reports of its family are failures, and another process goes on with the next one. A warning on standard error
    says so where references could not be isolated, or not fully.
    """
    if settings.device == "cpu" and not settings.full and not available():
        click.echo("warning: this platform cannot isolate references", err=True)
    weaker: set[str] = set()
    waiting: deque[Group] = deque(by_family(tasks))
    with _no_interrupt_while_they_start():
        helpers = [_Helper() for _ in range(min(jobs, len(waiting)))]
    try:
        for helper in helpers:
            helper.begin(waiting.popleft(), settings)
        while busy := [helper for helper in helpers if helper.group]:
            ready = wait([helper.connection for helper in busy])
            for helper in [one for one in busy if one.connection in ready]:
                group, (answers, level) = helper.group, helper.answers(settings)
                if helper.died:
                    helpers.remove(helper)
                    helper.end()
                    if waiting:
                        with _no_interrupt_while_they_start():
                            helpers.append(helper := _Helper())
                if waiting:
                    helper.begin(waiting.popleft(), settings)
                weaker |= {level} - {STRONGEST}
                for batch, each in zip(group, answers, strict=True):
                    for report in received(each, batch, settings):
                        advance(report.definition, True)
                        yield report
        for level in sorted(weaker):
            click.echo(f"warning: references were isolated by {level} only; see SECURITY.md", err=True)
    finally:
        for helper in helpers:
            helper.end()


class _Helper:
    """A process that verifies one group after another.

    Attributes:
        connection: to it.
        group: what it verifies now; nothing if it has no work.
        died: it answers no more.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.group: Group = ()
        self.died = False
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        self._process.start()
        # With this end open here as well, nobody would notice that the process has died.
        theirs.close()

    def begin(self, group: Group, settings: Settings) -> None:
        self.group = group
        with suppress(OSError):  # it has died: `answers` finds out
            self.connection.send([shipment(batch, settings) for batch in group])

    def answers(self, settings: Settings) -> Answers:
        """What it answered; failures if it died. Then it has no work."""
        group, self.group = self.group, ()
        try:
            found: Answers = self.connection.recv()
        except (EOFError, OSError):
            self.died = True
            self._process.join(PATIENCE)
            code = self._process.exitcode
            text = f"the process that verified it, or another Definition of its family, died (exit code {code})"
            return [[_failed(task, settings, text) for task in batch] for batch in group], STRONGEST
        return found

    def end(self) -> None:
        """Ends the process, at once if it has work."""
        self.connection.close()
        if not self.group:
            self._process.join(PATIENCE)
        self._process.terminate()
        self._process.join()


def _failed(task: Task, settings: Settings, text: str) -> Answer:
    return Report(task.definition.name, task.target, settings.device, "failed", message=text), None


def _serve(connection: Connection) -> None:
    """Runs in the other process, until nobody asks any more."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # at a terminal, it reaches all; the process that asked ends the others
    with suppress(EOFError, OSError):
        while True:
            connection.send(_run(connection.recv()))


def _run(sent: Sequence[Shipment]) -> Answers:
    answers = [run_shipment(one) for one in sent]
    settings = sent[0].settings
    worker = reference_process() if settings.device == "cpu" and not settings.full else None
    return answers, (worker.level if worker is not None else "") or STRONGEST


@contextmanager
def _no_interrupt_while_they_start() -> Iterator[None]:
    """Holds an interrupt back: it would end processes that do not ignore it yet, with a traceback each."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let interrupts through again when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
