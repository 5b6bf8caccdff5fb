"""Tasks in processes of their own, each with limits of time and memory; one that hangs or dies stops no other."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """A task without a result.

    Attributes:
        how: ``time`` or ``crashed``.
        detail: what happened, for people.
    """

    how: str
    detail: str


def outcomes(
    work: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    *,
    processes: int,
    seconds: float,
    start: Callable[..., None],
    started_with: Sequence[Any] = (),
) -> Iterator[Any]:
    """The result of `work` for each task, in their order; an `Ended` for one that took too long or ended its process.

    Args:
        work: called with the items of a task, in another process.
        tasks: the arguments of each call.
        processes: how many at once.
        seconds: limit of one task.
        start: called with `started_with` when a process begins, also one that replaces another.
        started_with: its arguments.
    """
    from pebble import ProcessExpired, ProcessPool

    pool = ProcessPool(
        max_workers=processes, initializer=start, initargs=list(started_with), context=get_context("spawn")
    )
    with pool:
        try:
            for future in [pool.schedule(work, args=list(task), timeout=seconds) for task in tasks]:
                try:
                    yield future.result()
                except FutureTimeoutError:
                    yield Ended("time", f"no answer within {seconds} s")
                except ProcessExpired as error:
                    yield Ended("crashed", f"the process ended with exit code {error.exitcode}")
        except BaseException:
            pool.stop()
            raise


def limit_memory(size: int) -> None:
    """Allows this process `size` bytes of address space beyond what it has; what asks for more gets a MemoryError."""
    used = 0
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def default_processes() -> int:
    """As many as the machine has cores, at most four."""
    return max(1, min(4, os.cpu_count() or 1))
