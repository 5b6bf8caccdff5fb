"""Prints the results of `verify` as they come. Imports torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import click

from flashinfer_trace.cli.options import fitted, text_row, width
from flashinfer_trace.format.json_values import finite
from flashinfer_trace.harness.twins import REAL_BYTES
from flashinfer_trace.harness.verify import Report

COLORS = {"passed": "green", "failed": "red", "skipped": "yellow", "stale": "red"}
#: Names in the line about Definitions without a case at their own sizes; --format json tells all.
NAMED = 3
HEADINGS = ("Definition", "against", "result", "cases", "vacuous", "error/bound", "seconds")


class Printer:
    """Prints each report as it comes: a run that is killed has told what it found. Then prints what they share.

    As text, a row of a table, and below it the message of the report unless an earlier one had the same. As JSON, one
    report a line, which together are a list.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]], output_format: str) -> None:
        self.reports: list[Report] = []
        self._json = output_format == "json"
        columns = zip(HEADINGS, *pairs, strict=False)
        self._widths = fitted([*(max(map(len, column)) for column in columns), 7, 5, 7, 11, 7], width())
        self._alike: dict[tuple[str, str], list[Report]] = {}

    def add(self, report: Report) -> None:
        """Prints one report."""
        self.reports.append(report)
        if self._json:
            self._open()
            text = json.dumps(finite(dataclasses.asdict(report)), ensure_ascii=False, allow_nan=False)
            click.echo(f"{',' if len(self.reports) > 1 else ' '}{text}")
            return
        if len(self.reports) == 1:
            self._row(HEADINGS)
        self._row(_cells(report))
        alike = self._alike.setdefault((report.status, report.message), [])
        alike.append(report)
        if report.message and len(alike) == 1:
            click.echo(f"  {report.message}")

    def finish(self, root: Path) -> None:
        """Prints what the reports have in common."""
        if self._json:
            self._open()
            click.echo("]")
            return
        for (status, message), alike in self._alike.items():
            if message and len(alike) > 1:
                first = alike[0]
                click.echo(f"\n{first.definition} ({first.target}) and {len(alike) - 1} more {status}: {message}")
        large = [report.definition for report in self.reports if report.only_twin]
        if large:
            click.echo(f"\n{_only_twins(large)}")
        counts = {status: sum(report.status == status for report in self.reports) for status in COLORS}
        shown = [f"{count} {status}" for status, count in counts.items() if count or status != "stale"]
        same = sum(bool(report.twin_of) for report in self.reports)
        note = f"; {same} share the small twin, and the cases, of another Definition" if same else ""
        click.echo(f"\n{', '.join(shown)}{note}; dataset: {root}")

    def _open(self) -> None:
        context = click.get_current_context()
        if "opened" not in context.meta:
            context.meta.update(opened=True, json=False)  # an error that comes now adds no document of its own
            click.echo("[")

    def _row(self, cells: Sequence[str]) -> None:
        click.echo(text_row(cells, self._widths, right=range(3, len(HEADINGS))))


def _only_twins(names: Sequence[str]) -> str:
    """How many Definitions have no case at their own sizes, why, which, and what to do about it."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    who = f"{len(names)} of these have no case at their" if len(names) > 1 else "1 of these has no case at its"
    why = f"own sizes on a CPU (inputs of more than {REAL_BYTES // 2**20} MiB)"
    return f"{who} {why}: {', '.join(names[:NAMED])}{more}; verify with --device cuda"


def _cells(report: Report) -> list[str]:
    # The figures come from the cases that passed, so they would say nothing about a failure.
    worst = f"{report.worst:.3f}" if report.status in ("passed", "stale") else "-"
    verdict = click.style(report.status, fg=COLORS[report.status])
    counts = [str(report.cases), str(report.vacuous), worst, f"{report.seconds:.1f}"]
    return [report.definition, report.target, verdict, *counts]
