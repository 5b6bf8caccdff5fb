"""Runs the tasks of `verify`. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from flashinfer_trace.cli.options import ORACLE_EXAMPLES
from flashinfer_trace.cli.reports import error_line
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.definition import InputError
from flashinfer_trace.harness.evidence import record as record_evidence
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Job, Report
from flashinfer_trace.harness.verify import verify as run_verification
from flashinfer_trace.isolation.worker import ReferenceWorker
from flashinfer_trace.ledger import DRAWN_CASES

__all__ = ["Settings", "run_tasks"]


@dataclass(frozen=True)
class Settings:
    """The options of a run that hold for all of its tasks."""

    device: str
    examples: int | None
    seed: int
    axes: dict[str, int] | None
    plan: dict[str, Any] | None
    full: bool
    evidence: Path | None
    worker: ReferenceWorker | None


def run_tasks(tasks: Sequence[Task], settings: Settings, advance: Callable[[str, bool], None]) -> Iterator[Report]:
    """The report of each task in turn; errors of a record, a reference or a kernel are in it, not raised.

    Raises:
        UsageError: the axes that were asked for do not fit a Definition.
        KeyboardInterrupt: also for an interrupt that Python discarded while the task before was running.
    """
    twins = Twins()
    with _lost_interrupts() as interrupted:
        for task in tasks:
            advance(f"{task.definition.name} ({task.target})", False)
            try:
                report = task.impossible(settings.device) or _verified(task, settings, twins)
            except click.ClickException:  # the axes or the plan that were asked for
                raise
            except Exception as error:
                message = "\n  ".join(filter(None, [error_line(error, task.definition), task.stale]))
                report = Report(task.definition.name, task.target, settings.device, "failed", message=message)
            advance("", True)
            yield report
            if interrupted():
                raise KeyboardInterrupt


def _verified(task: Task, settings: Settings, twins: Twins) -> Report:
    """Runs one task, and records what it proves."""
    kernel = task.kernel
    job = Job(task.definition, task.record, kernel, settings.device, settings.full, settings.worker)
    plan = _plan(job, settings)
    count = settings.examples or (DRAWN_CASES if kernel else ORACLE_EXAMPLES)
    if kernel is None and plan is None and not job.full and not job.large:
        report = twins.verify(job, examples=count, seed=settings.seed)
    else:
        report = run_verification(job, examples=count, seed=settings.seed, plan=plan)
    if task.stale:
        status = "stale" if report.status == "passed" else report.status
        return replace(report, status=status, message="\n  ".join(filter(None, [report.message, task.stale])))
    if settings.evidence and kernel and report.status == "passed" and plan is None:
        record_evidence(settings.evidence, job.definition, kernel, report)
    return report


def _plan(job: Job, settings: Settings) -> dict[str, Any] | None:
    """The one plan that --axes or --plan asks for, or None."""
    definition = job.sized
    if settings.axes is None:
        return settings.plan
    unknown = [name for name in settings.axes if name not in definition.var_axes]
    if unknown:
        raise click.UsageError(f"{definition.name}: {unknown} are not variable axes; those are {definition.var_axes}")
    try:
        return job.family.plan_for_axes(definition, settings.axes, Draws(settings.seed, "cpu"))
    except InputError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def _lost_interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Python discarded an interrupt, as it does when one meets a callback of the garbage collector."""
    lost: list[object] = []
    report = sys.unraisablehook

    def keep(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            lost.append(unraisable.exc_type)
        else:
            report(unraisable)

    sys.unraisablehook = keep
    try:
        yield lambda: bool(lost)
    finally:
        sys.unraisablehook = report
