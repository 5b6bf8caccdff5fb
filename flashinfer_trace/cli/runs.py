"""Runs the tasks of `verify`: in this process, or as batches that travel to others. Imports torch."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from flashinfer_trace.cli.options import ORACLE_EXAMPLES
from flashinfer_trace.cli.tasks import Task, error_line
from flashinfer_trace.dataset.evidence import DRAWN_CASES
from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness.evidence import add, entry_of
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.twins import Twins, has_real_size
from flashinfer_trace.harness.verify import Job, Report, verify_together
from flashinfer_trace.judging.user_inputs import explained
from flashinfer_trace.sandbox.fork_server import available
from flashinfer_trace.sandbox.worker import ReferenceWorker


@dataclass(frozen=True)
class Settings:
    """The options of a run that apply to all of its tasks.

    Attributes:
        evidence: where evidence is recorded; relative to the root of each Definition. None if it is not.
    """

    device: str
    examples: int | None
    seed: int
    axes: dict[str, int] | None
    plan: dict[str, Any] | None
    full: bool
    evidence: Path | None
    worker: ReferenceWorker | None


#: A task's report, and its evidence if some was asked for and it proves something.
Answer = tuple[Report, Mapping[str, Any] | None]


@dataclass(frozen=True)
class Batch:
    """Tasks of one Definition as they go to a process, here or on a cluster: functions of kernels do not travel.

    Attributes:
        targets: of each task, its target, and why it is broken or stale (see `Task`).
    """

    definition: Definition
    targets: tuple[tuple[str, str, str], ...]
    settings: Settings

    @classmethod
    def of(cls, tasks: Sequence[Task], settings: Settings) -> Batch:
        """The tasks; the worker that runs references does not travel."""
        targets = tuple((task.target, task.broken, task.stale) for task in tasks)
        return cls(tasks[0].definition, targets, replace(settings, worker=None))

    def tasks(self) -> list[Task]:
        """The tasks as they were. Where this machine lacks the dataset they came from, its own names the families."""
        root = self.definition.root
        definition = self.definition if root is None or root.is_dir() else replace(self.definition, root=None)
        if any(broken for _, broken, _ in self.targets):
            return [Task(definition, None, target, broken=broken) for target, broken, _ in self.targets]
        family = family_of(definition)
        kernels = {kernel.label: kernel for kernel in family.kernels_of(definition)}
        return [
            Task(definition, family, target, None if target == "oracle" else kernels[target], stale=stale)
            for target, _, stale in self.targets
        ]

    def run(self) -> list[Answer]:
        """The answers of this process, in the order of the tasks."""
        settings = self.settings
        if settings.device != "cpu" or not settings.full:
            torch.set_num_threads(1)  # other processes have the other cores
        if settings.device == "cpu" and not settings.full:
            settings = replace(settings, worker=reference_process())
        return run_batch(self.tasks(), settings, _twins())


@functools.cache
def reference_process() -> ReferenceWorker | None:
    """Where this process runs references; None where the platform cannot isolate them."""
    return ReferenceWorker() if available() else None


@functools.cache
def _twins() -> Twins:
    """The small twins that this process has verified."""
    return Twins()


def run_tasks(tasks: Sequence[Task], settings: Settings) -> Iterator[Report]:
    """Yields the report of each task as it comes, those of one family together: a worker serves one reference.

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
            for report in recorded(run_batch(batch, settings, twins), batch, settings):
                yield report
                if interrupted():
                    raise KeyboardInterrupt


def recorded(answers: Sequence[Answer], tasks: Sequence[Task], settings: Settings) -> Iterator[Report]:
    """The reports, whose evidence is recorded at once; a failed one for what could not be."""
    for task, (report, entry) in zip(tasks, answers, strict=True):
        if settings.evidence and entry is not None:
            try:
                add((task.definition.root or find_root()) / settings.evidence, task.definition, dict(entry))
            except Exception as error:
                report = _broken(task, settings, error)
        yield report


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


def run_batch(batch: Sequence[Task], settings: Settings, twins: Twins) -> list[Answer]:
    """The answers to tasks that belong together, in their order."""
    possible = {task.target: task.impossible(settings.device) for task in batch}
    run = [task for task in batch if possible[task.target] is None]
    try:
        found = dict(zip([task.target for task in run], _verified(run, settings, twins), strict=True)) if run else {}
    except click.ClickException:  # the requested axes or plan
        raise
    except Exception as error:
        found = {task.target: _broken(task, settings, error) for task in run}
    return [_answer(task, possible[task.target] or _stale(task, found[task.target]), settings) for task in batch]


def _answer(task: Task, report: Report, settings: Settings) -> Answer:
    """The report and what it proves: with --record, of a kernel that passed on drawn cases."""
    drawn = settings.plan is None and settings.axes is None
    if settings.evidence and drawn and task.kernel is not None and report.status == "passed":
        try:
            return report, entry_of(task.definition, task.kernel, report)
        except Exception as error:
            return _broken(task, settings, error), None
    return report, None


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
    """The report, which says if no case has the Definition's own sizes; a failed one if it proves nothing."""
    if report.status != "passed" or report.real_size:
        return report
    if not has_real_size(job.definition):
        return replace(report, only_twin=True)
    message = "the case at its own sizes proves nothing; let the plan of the family's record give one that does"
    return replace(report, status="failed", message=message)


def _stale(task: Task, report: Report) -> Report:
    """Says of a stale reference that what passed was not the present one."""
    if not task.stale:
        return report
    status = "stale" if report.status == "passed" else report.status
    return replace(report, status=status, message="\n  ".join(filter(None, [report.message, task.stale])))


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
