"""Judges mutants on a Ray cluster: those of one family as one task of Ray, in a process with the usual limits.

Every machine of the cluster needs this checkout at the same commit, and what is installed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import click
from ray.exceptions import RayError

from flashinfer_trace.cli.cluster import lost, run_everywhere
from tools.mutate.runner import judge_all


def judge_on_cluster(tasks: Sequence[tuple[str, str, str]], *, address: str) -> Iterator[tuple[int, Any]]:
    """As `runner.judge_all`, family by family as they come.

    Raises:
        ClickException: the cluster does not exist, or the worker of a family was lost repeatedly. Earlier verdicts
            are kept.
    """
    numbers = [list(own) for _, own in groupby(range(len(tasks)), key=lambda number: tasks[number][0])]
    for part, answer in run_everywhere(address, judge_here, [[tasks[number] for number in own] for own in numbers]):
        if isinstance(answer, RayError):
            raise click.ClickException(f"{tasks[numbers[part][0]][0]}: {lost(answer)}")
        yield from zip(numbers[part], answer, strict=True)


def judge_here(tasks: Sequence[tuple[str, str, str]]) -> list[Any]:
    """Runs in a worker of the cluster."""
    return [verdict for _, verdict in judge_all(tasks, processes=1)]
