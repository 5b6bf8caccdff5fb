"""Runs the tasks of `verify` on a Ray cluster: those of one Definition as one task of Ray. Imports torch and ray.

Every machine of the cluster needs this package, and what it verifies with, at the versions of the machine that asks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import ray
import torch
from ray.exceptions import RayError

from flashinfer_trace.cli.runs import Settings, batches, provable, run_batch
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.definition import Definition
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.evidence import add, entry_of
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.isolation.processes import available
from flashinfer_trace.isolation.worker import ReferenceWorker

__all__ = ["run_on_cluster"]

#: How often a task is run again whose worker was lost.
RETRIES = 3
#: Seconds between two looks for an interrupt.
PATIENCE = 0.5
#: A process serves many tasks, each on the GPU that Ray gives it: it must see all of them.
ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


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


def run_on_cluster(
    tasks: Sequence[Task], settings: Settings, address: str, advance: Callable[[str, bool], None]
) -> Iterator[Report]:
    """Yields the report of each task as it comes, and records what it proves.

    A task whose worker is lost is run again elsewhere, up to RETRIES times; then its reports are failures.

    Args:
        address: of the cluster, as `ray.init` takes it: ``auto``, ``local`` or ``HOST:PORT``.

    Raises:
        ClickException: there is no such cluster, or it has no GPU although the tasks need one.
    """
    try:
        ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": ENVIRONMENT})
    except (ConnectionError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise click.ClickException(f"--cluster {address}: {text}; `ray start --head` starts a cluster") from error
    try:
        gpu = torch.device(settings.device).type == "cuda"
        if gpu and not ray.cluster_resources().get("GPU"):
            raise click.ClickException(f"--cluster {address}: none of its machines has a GPU")
        remote = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=RETRIES, max_calls=0)(run_shipment)
        pending = {remote.remote(shipment(batch, settings)): batch for batch in batches(tasks)}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=PATIENCE)
            for reference in done:
                for report in _received(reference, pending.pop(reference), settings):
                    advance(report.definition, True)
                    yield report
    finally:
        ray.shutdown()


def shipment(batch: Sequence[Task], settings: Settings) -> Shipment:
    targets = tuple((task.target, task.broken, task.stale) for task in batch)
    return Shipment(batch[0].definition, targets, settings)


def _received(reference: Any, batch: Sequence[Task], settings: Settings) -> Iterator[Report]:
    """The reports that a worker sent, recorded here."""
    try:
        answers: list[tuple[Report, Mapping[str, Any] | None]] = ray.get(reference)
    except RayError as error:
        text = f"its worker was lost {RETRIES + 1} times: {' '.join(str(error).split())}"
        for task in batch:
            yield Report(task.definition.name, task.target, settings.device, "failed", message=text)
        return
    for task, (report, entry) in zip(batch, answers, strict=True):
        if settings.evidence and entry is not None:
            try:
                add(settings.evidence, task.definition, dict(entry))
            except Exception as error:
                message = f"{task.definition.name}: not recorded: {type(error).__name__}: {error}"
                report = replace(report, status="failed", message=message)
        yield report


def run_shipment(sent: Shipment) -> list[tuple[Report, Mapping[str, Any] | None]]:
    """Runs in a worker of the cluster: the reports, each with its entry of evidence if one was asked for."""
    settings = replace(sent.settings, device=own_device(sent.settings.device))
    if settings.device == "cpu" and not settings.full:
        torch.set_num_threads(1)
        settings = replace(settings, worker=reference_process())
    answers: list[tuple[Report, Mapping[str, Any] | None]] = []
    tasks = sent.tasks()
    for task, report in zip(tasks, run_batch(tasks, settings, twins()), strict=True):
        proves = task.kernel is not None and provable(task, settings, report)
        answers.append((report, entry_of(task.definition, task.kernel, report) if task.kernel and proves else None))
    return answers


def own_device(device: str) -> str:
    """The GPU that Ray gave the task, if it is one for a GPU.

    A process whose CUDA context an earlier kernel left unusable ends here: the task is run again in a new one.
    """
    if torch.device(device).type != "cuda":
        return device
    (number,) = ray.get_gpu_ids()
    # Where Ray hides the other GPUs all the same, the only one that is left is the first.
    device = f"cuda:{int(number) if int(number) < torch.cuda.device_count() else 0}"
    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)
    return device


@functools.cache
def twins() -> Twins:
    """The small twins that this process has verified."""
    return Twins()


@functools.cache
def reference_process() -> ReferenceWorker | None:
    """Where this process runs references; None where the platform cannot isolate them."""
    return ReferenceWorker() if available() else None
