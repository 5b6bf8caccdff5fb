"""What `verify` sends to other processes, here or on a cluster, and what they answer. Imports torch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flashinfer_trace.cli.runs import Settings, provable, run_batch
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.definition import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.evidence import add, entry_of
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.isolation.processes import available
from flashinfer_trace.isolation.worker import ReferenceWorker

__all__ = ["Answer", "Shipment", "received", "reference_process", "run_shipment", "shipment"]

#: A task's report, and its entry of evidence if one was asked for.
Answer = tuple[Report, Mapping[str, Any] | None]


@dataclass(frozen=True)
class Shipment:
    """What goes to a worker, which has the records of families itself: functions of kernels do not travel.

    Attributes:
        targets: of each task, its target, and why it is broken or stale (see `Task`).
    """

    definition: Definition
    targets: tuple[tuple[str, str, str], ...]
    settings: Settings

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


def shipment(batch: Sequence[Task], settings: Settings) -> Shipment:
    """The tasks of one Definition; the worker that runs references does not travel."""
    targets = tuple((task.target, task.broken, task.stale) for task in batch)
    return Shipment(batch[0].definition, targets, replace(settings, worker=None))


def run_shipment(sent: Shipment) -> list[Answer]:
    """Runs in another process: the answers, in the order of the tasks."""
    settings = sent.settings
    if settings.device == "cpu" and not settings.full:
        torch.set_num_threads(1)
        settings = replace(settings, worker=reference_process())
    answers: list[Answer] = []
    tasks = sent.tasks()
    for task, report in zip(tasks, run_batch(tasks, settings, _twins()), strict=True):
        proves = task.kernel is not None and provable(task, settings, report)
        answers.append((report, entry_of(task.definition, task.kernel, report) if task.kernel and proves else None))
    return answers


def received(answers: Sequence[Answer], batch: Sequence[Task], settings: Settings) -> Iterator[Report]:
    """The reports that came back, recorded here; a failed one for what could not be recorded."""
    for task, (report, entry) in zip(batch, answers, strict=True):
        if settings.evidence and entry is not None:
            try:
                add(settings.evidence, task.definition, dict(entry))
            except Exception as error:
                message = f"{task.definition.name}: not recorded: {type(error).__name__}: {error}"
                report = replace(report, status="failed", message=message)
        yield report


@functools.cache
def reference_process() -> ReferenceWorker | None:
    """Where this process runs references; None where the platform cannot isolate them."""
    return ReferenceWorker() if available() else None


@functools.cache
def _twins() -> Twins:
    """The small twins that this process has verified."""
    return Twins()
