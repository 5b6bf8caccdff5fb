"""Options and output helpers that several commands share."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.dataset import store
from flashinfer_trace.judging.user_inputs import LARGEST_SEED

if TYPE_CHECKING:
    from flashinfer_trace.format.definition import Definition
    from flashinfer_trace.judging.traffic import Workload

__all__ = [
    "CPU_JOBS",
    "GPU_JOBS",
    "ORACLE_EXAMPLES",
    "SEEDS",
    "SHARED_FROM",
    "RealRange",
    "chosen_workloads",
    "counted",
    "dataset_root",
    "format_option",
    "matching_names",
    "text_row",
    "text_table",
    "usual_jobs",
]

#: Default number of real cases in which a reference is compared with its oracle.
ORACLE_EXAMPLES = 20

#: From how many Definitions on several processes verify them unless told otherwise.
SHARED_FROM = 20
#: How many at most on the CPU; and on each GPU, which one process leaves idle while Python prepares its next case.
CPU_JOBS, GPU_JOBS = 4, 8

#: What every option --seed takes.
SEEDS = click.IntRange(0, LARGEST_SEED)


class RealRange(click.FloatRange):
    """A number in a range. NaN is in none, but click's ranges let it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


format_option = click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", help="Format of the output."
)


def dataset_root() -> Path:
    """The dataset root that a command reads. Warns if the code, or the current checkout, is in another place."""
    root = store.find_root()
    code = root / "flashinfer_trace"
    checkout = store.enclosing_checkout()
    if (code / "__init__.py").is_file() and code.resolve() != store.PACKAGE:
        click.echo(
            f"warning: the dataset is {root}, but the code (family records, rules) is {store.PACKAGE}; "
            f"to use the code there too: pip install -e {root}",
            err=True,
        )
    elif checkout is not None and root == store.PACKAGE / "data":
        click.echo(
            f"warning: the dataset is the installed copy, {root}, not the checkout {checkout}; "
            f"to use the checkout: pip install -e {checkout}",
            err=True,
        )
    return root


def matching_names(patterns: Sequence[str]) -> list[str]:
    """Names of the Definitions that match the patterns, or all names; a pattern without a match is a usage error."""
    stems = [path.stem for path in store.definition_paths()]
    chosen: list[str] = []
    for pattern in patterns:
        matches = fnmatch.filter(stems, pattern)
        if not matches:
            hint = store.closest(pattern, stems) or "`flashinfer-trace list` shows all names"
            places = ", ".join(str(root / "definitions") for root in store.find_roots())
            raise click.UsageError(f"no Definition matches {pattern!r} in {places}; {hint}")
        chosen += matches
    return list(dict.fromkeys(chosen)) if patterns else stems


def chosen_workloads(definition: Definition, names: Sequence[str], option: str) -> list[Workload]:
    """The workloads of a Definition with these names; another name is a usage error of `option`."""
    from flashinfer_trace.judging.traffic import workloads

    every = {one.name: one for one in workloads(definition)}
    unknown = [name for name in names if name not in every]
    if unknown or not names:
        wrong = f"has no workload {unknown}" if names else "needs the name of a workload"
        raise click.UsageError(f"{option}: {definition.name} {wrong}; it has {', '.join(every)}")
    return [one for name, one in every.items() if name in names]


def usual_jobs(definitions: int, gpus: int) -> int:
    """Processes for so many Definitions, on the CPU or so many GPUs.

    Each takes seconds to start, and a GiB or two at real sizes.
    """
    if definitions < SHARED_FROM:
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(processors, GPU_JOBS * gpus or CPU_JOBS)


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 problem``, ``2 problems``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def text_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table for people, headings first. Nothing is wrapped or cut, so that every cell can be found by a search.

    Args:
        rows: cells, which may contain colours.
        right: indices of the right-aligned columns.
    """
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(text_row(row, widths, right) for row in rows)


def text_row(cells: Sequence[str], widths: Sequence[int], right: Sequence[int] = ()) -> str:
    """A row of `text_table` with columns of these widths."""
    padded = []
    for index, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - len(click.unstyle(cell)))
        padded.append(space + cell if index in right else cell + space)
    return "  ".join(padded).rstrip()
