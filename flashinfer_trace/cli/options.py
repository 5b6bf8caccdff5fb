"""Options and answers that several commands share."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

import click

from flashinfer_trace import dataset

__all__ = ["ORACLE_EXAMPLES", "counted", "dataset_root", "format_option", "matching_names", "text_table"]

#: Real cases that a reference is compared with its oracle in, unless told otherwise.
ORACLE_EXAMPLES = 20

format_option = click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", help="How the result is printed."
)


def dataset_root() -> Path:
    """The dataset root that a command reads; says on standard error if the code comes from somewhere else."""
    root = dataset.find_root()
    code = root / "flashinfer_trace"
    checkout = dataset.enclosing_checkout()
    if (code / "__init__.py").is_file() and code.resolve() != dataset.PACKAGE:
        click.echo(
            f"warning: the dataset is {root}, but the code (family records, rules) is {dataset.PACKAGE}; "
            f"to use the code there too: pip install -e {root}",
            err=True,
        )
    elif checkout is not None and root == dataset.PACKAGE / "data":
        click.echo(
            f"warning: the dataset is the installed copy, {root}, not the checkout {checkout}; "
            f"to use the checkout: pip install -e {checkout}",
            err=True,
        )
    return root


def matching_names(patterns: Sequence[str], root: Path) -> list[str]:
    """Names of Definitions by name or glob, or all of them; a pattern that matches nothing is a usage error."""
    stems = [path.stem for path in dataset.definition_paths(root)]
    chosen: list[str] = []
    for pattern in patterns:
        matches = fnmatch.filter(stems, pattern)
        if not matches:
            hint = dataset.closest(pattern, stems) or "`flashinfer-trace list` shows all names"
            raise click.UsageError(f"no Definition matches {pattern!r} in {root / 'definitions'}; {hint}")
        chosen += matches
    return list(dict.fromkeys(chosen)) if patterns else stems


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 problem``, ``2 problems``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def text_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table for people, headings first. Nothing is wrapped or cut, so that every cell can be searched for.

    Args:
        rows: cells, which may hold colours.
        right: indices of the columns that are aligned to the right.
    """
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - len(click.unstyle(cell)))
            padded.append(space + cell if index in right else cell + space)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
