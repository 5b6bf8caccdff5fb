"""Runs work on a Ray cluster: the tasks of `verify`, those of one Definition as one task of Ray. Imports torch and ray.

Every machine of the cluster needs this package, and what it verifies with, at the versions of the machine that asks.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import click
import ray
import torch
from ray.exceptions import RayError

from flashinfer_trace.cli.processes import ANSWERS_WITHIN
from flashinfer_trace.cli.runs import Answer, Batch, Settings, batches, recorded
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.harness.verify import Report

#: How often a task is run again whose worker was lost.
RETRIES = 3
#: Seconds between two looks for an interrupt.
PATIENCE = 0.5
#: A process serves many tasks, each on the GPU that Ray gives it: it must see all of them.
ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def run_everywhere(
    address: str, function: Callable[..., Any], work: Sequence[Any], *, gpu: bool = False
) -> Iterator[tuple[int, Any]]:
    """Calls `function` with each item of `work` in a task of Ray; yields (number of the item, answer) as they come.

    A task whose worker is lost is run again elsewhere, up to RETRIES times. Then its answer is a `RayError`, as is that
    of one that raises.

    Args:
        address: of the cluster, as `ray.init` takes it: ``auto``, ``local`` or ``HOST:PORT``.
        function: what a worker imports and calls.
        gpu: whether each task needs one.

    Raises:
        ClickException: the cluster does not exist, or it has no GPU although the tasks need one.
    """
    if not work:
        return
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.WARNING,
            runtime_env={"env_vars": ENVIRONMENT},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise click.ClickException(f"--cluster {address}: {text}; `ray start --head` starts a cluster") from error
    try:
        if gpu and not ray.cluster_resources().get("GPU"):
            raise click.ClickException(f"--cluster {address}: none of its machines has a GPU")
        remote = ray.remote(num_cpus=1, num_gpus=int(gpu), max_retries=RETRIES, max_calls=0)(function)
        pending = {remote.remote(item): number for number, item in enumerate(work)}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=PATIENCE)
            for reference in done:
                number = pending.pop(reference)
                try:
                    yield number, ray.get(reference)
                except RayError as error:
                    yield number, error
    finally:
        ray.shutdown()


def run_on_cluster(tasks: Sequence[Task], settings: Settings, address: str) -> Iterator[Report]:
    """Yields the report of each task as it comes, and records what it proves; those of a lost worker are failures.

    A worker that takes more than ANSWERS_WITHIN seconds for one Definition ends itself, and so counts as lost.
    """
    gpu = torch.device(settings.device).type == "cuda"
    each = list(batches(tasks))
    hint = f"one that does not answer within {ANSWERS_WITHIN:g} s ends itself: a kernel may hang"
    for number, answer in run_everywhere(address, run_batch, [Batch.of(one, settings) for one in each], gpu=gpu):
        if isinstance(answer, RayError):
            for task in each[number]:
                message = f"{lost(answer)}; {hint}"
                yield Report(task.definition.name, task.target, settings.device, "failed", message=message)
        else:
            yield from recorded(answer, each[number], settings)


def lost(error: RayError) -> str:
    return f"its worker was lost {RETRIES + 1} times: {' '.join(str(error).split())}"


def run_batch(batch: Batch) -> list[Answer]:
    """Runs in a worker of the cluster, on the GPU that Ray gave it. One that takes too long ends the worker."""
    faulthandler.dump_traceback_later(ANSWERS_WITHIN, exit=True)  # even if a kernel keeps Python's lock
    try:
        own = replace(batch.settings, device=own_device(batch.settings.device))
        return replace(batch, settings=own).run()
    finally:
        faulthandler.cancel_dump_traceback_later()


def own_device(device: str) -> str:
    """The GPU that Ray gave the task, if it is one for a GPU.

    A process whose CUDA context an earlier kernel left unusable ends here: the task is run again in a new one.
    """
    if torch.device(device).type != "cuda":
        return device
    (number,) = ray.get_gpu_ids()
    # Where Ray hides the other GPUs anyway, the only one left is the first.
    device = f"cuda:{int(number) if int(number) < torch.cuda.device_count() else 0}"
    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    except RuntimeError:
        os._exit(1)
    return device
