"""Runs the tasks of `verify` on a Ray cluster: those of one Definition as one task of Ray. Imports torch and ray.

Every machine of the cluster needs this package, and what it verifies with, at the versions of the machine that asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
import ray
import torch
from ray.exceptions import RayError

from flashinfer_trace.cli.runs import Settings, batches
from flashinfer_trace.cli.shipments import Answer, Shipment, received, run_shipment, shipment
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.harness.verify import Report

__all__ = ["run_on_cluster"]

#: How often a task is run again whose worker was lost.
RETRIES = 3
#: Seconds between two looks for an interrupt.
PATIENCE = 0.5
#: A process serves many tasks, each on the GPU that Ray gives it: it must see all of them.
ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


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
        remote = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=RETRIES, max_calls=0)(run_shipment_here)
        pending = {remote.remote(shipment(batch, settings)): batch for batch in batches(tasks)}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=PATIENCE)
            for reference in done:
                for report in _received(reference, pending.pop(reference), settings):
                    advance(report.definition, True)
                    yield report
    finally:
        ray.shutdown()


def _received(reference: Any, batch: Sequence[Task], settings: Settings) -> Iterator[Report]:
    """The reports that a worker sent, recorded here."""
    try:
        answers: list[Answer] = ray.get(reference)
    except RayError as error:
        text = f"its worker was lost {RETRIES + 1} times: {' '.join(str(error).split())}"
        for task in batch:
            yield Report(task.definition.name, task.target, settings.device, "failed", message=text)
        return
    yield from received(answers, batch, settings)


def run_shipment_here(sent: Shipment) -> list[Answer]:
    """Runs in a worker of the cluster, on the GPU that Ray gave it."""
    return run_shipment(replace(sent, settings=replace(sent.settings, device=own_device(sent.settings.device))))


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
