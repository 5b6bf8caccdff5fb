"""Runs the tasks of `verify` in several processes of this machine. Imports torch."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import click

from flashinfer_trace.cli.runs import Settings, by_family
from flashinfer_trace.cli.shipments import Answer, Shipment, received, reference_process, run_shipment, shipment
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.isolation.confine import STRONGEST
from flashinfer_trace.isolation.processes import available

__all__ = ["run_in_processes"]

#: Seconds between two looks for an interrupt.
PATIENCE = 0.5

#: What a process answers: of each shipment, the answers; and how references were isolated.
Answers = tuple[list[list[Answer]], str]


def run_in_processes(
    tasks: Sequence[Task], settings: Settings, jobs: int, advance: Callable[[str, bool], None]
) -> Iterator[Report]:
    """Yields the report of each task as it comes, recorded here if asked for.

    The Definitions of one family go to one process, because many of them have the same small twin. If a process dies,
    the reports of all tasks that were not finished are failures. A warning on standard error says so where references
    could not be isolated, or not fully.
    """
    if settings.device == "cpu" and not settings.full and not available():
        click.echo("warning: this platform cannot isolate references", err=True)
    weaker: set[str] = set()
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)
    pending: dict[Future[Answers], list[list[Task]]] = {}
    try:
        for group in by_family(tasks):
            pending[pool.submit(_run, [shipment(batch, settings) for batch in group])] = group
        while pending:
            done, _ = wait(pending, PATIENCE, FIRST_COMPLETED)
            for future in done:
                group = pending.pop(future)
                answers, level = _received(future, group, settings)
                weaker |= {level} - {STRONGEST}
                for batch, each in zip(group, answers, strict=True):
                    for report in received(each, batch, settings):
                        advance(report.definition, True)
                        yield report
        for level in sorted(weaker):
            click.echo(f"warning: references were isolated by {level} only; see SECURITY.md", err=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        if pending:  # interrupted
            for process in multiprocessing.active_children():
                process.terminate()


def _received(future: Future[Answers], group: Sequence[Sequence[Task]], settings: Settings) -> Answers:
    """What a process answered; failures if it died."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        text = f"a process that verified it, or Definitions beside it, died: {error}"
        device = settings.device
        return [
            [(Report(task.definition.name, task.target, device, "failed", message=text), None) for task in batch]
            for batch in group
        ], STRONGEST


def _run(sent: Sequence[Shipment]) -> Answers:
    """Runs in another process."""
    answers = [run_shipment(one) for one in sent]
    settings = sent[0].settings
    worker = reference_process() if settings.device == "cpu" and not settings.full else None
    return answers, (worker.level if worker is not None else "") or STRONGEST


def _ignore_interrupts() -> None:
    """An interrupt at the terminal reaches all processes of its group; the one that asked ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
