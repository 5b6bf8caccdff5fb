"""Options and output helpers that several commands share."""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.dataset import store
from flashinfer_trace.judging.user_inputs import LARGEST_SEED

if TYPE_CHECKING:
    from flashinfer_trace.format.definition import Definition
    from flashinfer_trace.judging.traffic import Workload


#: Default number of real cases in which a reference is compared with its oracle.
ORACLE_EXAMPLES = 20

#: From how many Definitions on several processes verify them unless told otherwise.
SHARED_FROM = 20
#: How many at most on the CPU; and on each GPU, which one process leaves idle while Python prepares its next case.
CPU_JOBS, GPU_JOBS = 4, 8

#: How narrow a column of a table can become, in characters.
NARROWEST = 12

#: Values of every option --seed.
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


def is_file(text: str) -> bool:
    """Whether an argument means a file, and not a name or a glob of names."""
    return text.endswith(".json") or "/" in text


@contextmanager
def missing_packages(
    extra: str = "verify", raised: type[click.ClickException] = click.ClickException
) -> Iterator[None]:
    """Adds to an ImportError how to install what is missing."""
    try:
        yield
    except ImportError as error:
        message = f"{error}; `pip install 'flashinfer-trace[{extra}]'` installs it"
        raise raised(message) from error


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


def width() -> int:
    """Columns of the terminal that standard output is; 0, which means no limit, if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def text_table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), columns: int | None = None) -> str:
    """A table for people, headings first. On a terminal, long cells are wrapped to fit it.

    Elsewhere, nothing is wrapped or cut, so every cell can be found by a search.

    Args:
        rows: cells, which can contain colors.
        right: indices of the right-aligned columns.
        columns: of the screen; 0 for no limit. By default those of the terminal.
    """
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    fitting = fitted(widths, width() if columns is None else columns)
    return "\n".join(text_row(row, fitting, right) for row in rows)


def fitted(widths: Sequence[int], columns: int) -> list[int]:
    """The widths of columns; the widest are narrowed until a table fits the screen."""
    found = list(widths)
    while columns and sum(found) + 2 * (len(found) - 1) > columns and max(found) > NARROWEST:
        found[found.index(max(found))] -= 1
    return found


def text_row(cells: Sequence[str], widths: Sequence[int], right: Sequence[int] = ()) -> str:
    """A row of `text_table` with columns of these widths, over several lines if a cell is longer."""
    parts = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for line in itertools.zip_longest(*parts, fillvalue=""):
        padded = []
        for index, (cell, width) in enumerate(zip(line, widths, strict=True)):
            space = " " * (width - len(click.unstyle(cell)))
            padded.append(space + cell if index in right else cell + space)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _wrapped(cell: str, width: int) -> list[str]:
    plain = click.unstyle(cell)
    return [cell] if len(plain) <= width else textwrap.wrap(plain, width, break_on_hyphens=False) or [""]


@contextmanager
def progress(total: int | None, output_format: str, label: str = "") -> Iterator[Callable[[str], None]]:
    """Shows progress on standard error if that is a terminal; prints nothing otherwise.

    Args:
        total: steps, each of which calls what is yielded with its label; None if nobody knows how many.
        output_format: nothing is shown for ``json``.
        label: what is shown first.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    known = (MofNCompleteColumn(),) if total is not None else ()
    columns = (BarColumn(), *known, TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = output_format == "json" or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True) as shown:
        task = shown.add_task(label, total=total)
        yield lambda name: shown.update(task, description=name, advance=1)
