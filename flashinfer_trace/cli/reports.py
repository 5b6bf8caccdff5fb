"""Prints the results of `verify`. Imports torch."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from flashinfer_trace import dataset, families
from flashinfer_trace.cli.group import echo_json, is_ours
from flashinfer_trace.cli.options import text_table
from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.real_size import REAL_BYTES
from flashinfer_trace.harness.verify import Report

__all__ = ["error_line", "error_place", "print_reports"]

COLOURS = {"passed": "green", "failed": "red", "skipped": "yellow", "stale": "red"}
#: Names in the line about Definitions without a case at their own sizes; --format json tells all.
NAMED = 3
HEADINGS = ("Definition", "against", "result", "cases", "vacuous", "error/bound", "seconds")


def print_reports(reports: Sequence[Report], root: Path, output_format: str) -> None:
    """Prints a table, the messages of the reports, and what they have in common; or a JSON list of the reports."""
    if output_format == "json":
        echo_json([dataclasses.asdict(report) for report in reports])
        return
    if reports:
        click.echo(text_table([HEADINGS, *map(_row, reports)], right=range(3, len(HEADINGS))))
    for alike in _by_message(reports):
        first, others = alike[0], len(alike) - 1
        more = f" and {others} more" if others else ""
        click.echo(f"\n{first.definition} ({first.target}){more} {first.status}: {first.message}")
    large = [report.definition for report in reports if report.only_twin]
    if large:
        click.echo(f"\n{_only_twins(large)}")
    counts = {status: sum(report.status == status for report in reports) for status in COLOURS}
    shown = [f"{count} {status}" for status, count in counts.items() if count or status != "stale"]
    same = sum(bool(report.twin_of) for report in reports)
    note = f"; {same} share the small twin, and the cases, of another Definition" if same else ""
    click.echo(f"\n{', '.join(shown)}{note}; dataset: {root}")


def _only_twins(names: Sequence[str]) -> str:
    """How many Definitions have no case at their own sizes, why, which, and what to do about it."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    who = f"{len(names)} of these have no case at their" if len(names) > 1 else "1 of these has no case at its"
    why = f"own sizes on a CPU (inputs of more than {REAL_BYTES // 2**20} MiB)"
    return f"{who} {why}: {', '.join(names[:NAMED])}{more}; verify with --device cuda"


def _row(report: Report) -> list[str]:
    # The figures come from the cases that passed, so they would say nothing about a failure.
    worst = f"{report.worst:.3f}" if report.status in ("passed", "stale") else "-"
    verdict = click.style(report.status, fg=COLOURS[report.status])
    counts = [str(report.cases), str(report.vacuous), worst, f"{report.seconds:.1f}"]
    return [report.definition, report.target, verdict, *counts]


def _by_message(reports: Sequence[Report]) -> list[list[Report]]:
    """Reports that have a message, grouped by status and message."""
    found: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        if report.message:
            found.setdefault((report.status, report.message), []).append(report)
    return list(found.values())


def error_line(error: Exception, definition: Definition) -> str:
    """One line for an error outside a case: the file, what is wrong and the fix, instead of a traceback."""
    text = error_place(error)
    if is_ours(error):
        return f"{definition.path}: {text}" if text.startswith(f"{definition.name}:") else text
    return f"{text}; correct it, then run `flashinfer-trace verify {definition.name}` again"


def error_place(error: Exception) -> str:
    """File, line and message of an error, in one line; only the message of an error of this package."""
    text = " ".join(str(error).split())
    if is_ours(error):
        return text
    if isinstance(error, SyntaxError) and error.filename:
        place, text = f"{error.filename}:{error.lineno}", error.msg
    else:
        # The innermost line in the records, which contributors write; else in the package; else anywhere.
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        records = [frame for frame in frames if any(map(Path(frame.filename).is_relative_to, families.__path__))]
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(dataset.PACKAGE)]
        frame = (records or ours or frames)[0]
        place = f"{frame.filename}:{frame.lineno}"
    return f"{place}: {type(error).__name__}: {text}"
