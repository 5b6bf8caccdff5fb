"""Runs the tasks of `verify`. Imports torch."""

from __future__ import annotations

import itertools
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
from flashinfer_trace.harness.real_size import has_real_size
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Job, Report, verify_together
from flashinfer_trace.isolation.worker import ReferenceWorker
from flashinfer_trace.ledger import DRAWN_CASES
from flashinfer_trace.requested import explained

__all__ = ["Settings", "batches", "by_family", "provable", "run_batch", "run_tasks"]


@dataclass(frozen=True)
class Settings:
    """The options of a run that apply to all of its tasks."""

    device: str
    examples: int | None
    seed: int
    axes: dict[str, int] | None
    plan: dict[str, Any] | None
    full: bool
    evidence: Path | None
    worker: ReferenceWorker | None


def run_tasks(tasks: Sequence[Task], settings: Settings, advance: Callable[[str, bool], None]) -> Iterator[Report]:
    """Yields the report of each task, those of one family together: a worker process serves one reference.

    A report includes errors of a record, a reference or a kernel; they are not raised. Successive kernels of one
    Definition are verified together. There is no limit of time here: a kernel that hangs stops the run. In several
    processes it does not (`processes.run_in_processes`).

    Raises:
        UsageError: the requested axes do not fit a Definition.
        KeyboardInterrupt: also for an interrupt that Python discarded while a task was running.
    """
    twins = Twins()
    with _lost_interrupts() as interrupted:
        for batch in itertools.chain.from_iterable(by_family(tasks)):
            targets = ", ".join(task.target for task in batch)
            advance(f"{batch[0].definition.name} ({targets})", False)
            for task, report in zip(batch, run_batch(batch, settings, twins), strict=True):
                advance("", True)
                yield _recorded(task, settings, report)
                if interrupted():
                    raise KeyboardInterrupt


def batches(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Successive tasks of one Definition together: all against kernels, or all against the oracle."""
    for _, batch in itertools.groupby(tasks, lambda task: (task.definition.name, task.kernel is not None)):
        yield list(batch)


def by_family(tasks: Sequence[Task]) -> list[list[list[Task]]]:
    """The batches of each family, those of large families first: what begins last should be short."""
    families: dict[str, list[list[Task]]] = {}
    for batch in batches(tasks):
        family = batch[0].family
        families.setdefault(family.name if family else "", []).append(batch)
    return sorted(families.values(), key=len, reverse=True)


def run_batch(batch: Sequence[Task], settings: Settings, twins: Twins) -> list[Report]:
    """The reports of tasks that belong together, in their order; nothing is recorded."""
    possible = {task.target: task.impossible(settings.device) for task in batch}
    run = [task for task in batch if possible[task.target] is None]
    try:
        found = dict(zip([task.target for task in run], _verified(run, settings, twins), strict=True)) if run else {}
    except click.ClickException:  # the requested axes or plan
        raise
    except Exception as error:
        found = {task.target: _broken(task, settings, error) for task in run}
    return [possible[task.target] or _stale(task, found[task.target]) for task in batch]


def _broken(task: Task, settings: Settings, error: Exception) -> Report:
    message = error_line(error, task.definition)
    return Report(task.definition.name, task.target, settings.device, "failed", message=message)


def _verified(tasks: Sequence[Task], settings: Settings, twins: Twins) -> list[Report]:
    """Runs tasks of one Definition that can be run here."""
    where = settings.device, settings.full, settings.worker
    jobs = [Job(task.definition, task.record, task.kernel, *where) for task in tasks]
    first = jobs[0]
    plan = _plan(first, settings)
    count = settings.examples or (DRAWN_CASES if first.kernel else ORACLE_EXAMPLES)
    if first.kernel is None and plan is None and not first.full and not first.large:
        return [_at_own_sizes(job, twins.verify(job, examples=count, seed=settings.seed)) for job in jobs]
    return verify_together(jobs, examples=count, seed=settings.seed, plan=plan)


def _at_own_sizes(job: Job, report: Report) -> Report:
    """The report, which says if there is no case at the Definition's own sizes; a failed one if it proves nothing."""
    if report.status != "passed" or report.real_size:
        return report
    if not has_real_size(job.definition):
        return replace(report, only_twin=True)
    message = "the case at its own sizes proves nothing; make the family's plan_for_axes draw one that does"
    return replace(report, status="failed", message=message)


def _stale(task: Task, report: Report) -> Report:
    """Says of a stale reference that what passed was not the present one."""
    if not task.stale:
        return report
    status = "stale" if report.status == "passed" else report.status
    return replace(report, status=status, message="\n  ".join(filter(None, [report.message, task.stale])))


def provable(task: Task, settings: Settings, report: Report) -> bool:
    """Whether a report is to be recorded: --record, and a kernel that passed on drawn cases."""
    wanted = settings.evidence is not None and settings.plan is settings.axes is None
    return wanted and task.kernel is not None and report.status == "passed"


def _recorded(task: Task, settings: Settings, report: Report) -> Report:
    """The report; a failed one if it proves something that cannot be recorded."""
    if settings.evidence and task.kernel and provable(task, settings, report):
        try:
            record_evidence(settings.evidence, task.definition, task.kernel, report)
        except Exception as error:
            return _broken(task, settings, error)
    return report


def _plan(job: Job, settings: Settings) -> dict[str, Any] | None:
    """The one plan that --axes or --plan requests, or None."""
    definition = job.sized
    if settings.axes is None:
        return settings.plan
    unknown = [name for name in settings.axes if name not in definition.var_axes]
    if unknown:
        raise click.UsageError(
            f"{definition.name}: {unknown} are not variable axes; the variable axes are {definition.var_axes}"
        )
    try:
        with explained(definition, settings.axes):
            # The inputs are made for their errors: in a run they would be the reference's.
            job.family.inputs_for_axes(definition, settings.axes, settings.seed, settings.device)
            return job.family.plan_for_axes(definition, settings.axes, Draws(settings.seed, "cpu"))
    except InputError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def _lost_interrupts() -> Iterator[Callable[[], bool]]:
    """Tells whether Python discarded an interrupt, as it does if one arrives in a callback of the garbage collector."""
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
