"""The plan as a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from flashinfer_trace.dataset.validation import Problem, Result, format_text
from tools.extract_definitions.gaps import OUTSIDE, PARTLY, UNSUPPORTED
from tools.extract_definitions.plan import CONFLICT, STATES, Plan, Row

MAX_MODELS = 4
#: Characters of a detail that are shown without --verbose.
MAX_DETAIL = 160


def table(plan: Plan, verbose: bool = False) -> str:
    """One line per Definition or op: state, name, models, detail; then the sizes left out, the totals and conflicts."""
    cells = [
        (row.state, row.name, _models(row.models), detail(row, verbose)) for state in STATES for row in plan.of(state)
    ]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    headings = ("State", "Definition or op", "Models", "Detail")
    widths = [max(width, len(heading)) for width, heading in zip(widths, headings, strict=False)]
    lines = [_line(cell, widths) for cell in (headings, tuple("-" * width for width in (*widths, 6)), *cells)]
    lines += [f"left out: {note}" for note in plan.notes]
    return "\n".join([*lines, totals(plan), *conflicts(plan)])


def conflicts(plan: Plan) -> list[str]:
    """One line per conflict, for the end of a report."""
    return [f"conflict: {row.name}: {row.detail}" for row in plan.of(CONFLICT)]


def gaps(plan: Plan, verbose: bool) -> list[str]:
    """One line per op that no family covers, and how many other rows there are to review; `verbose` lists them, too."""
    states = (UNSUPPORTED, PARTLY, OUTSIDE) if verbose else (UNSUPPORTED,)
    lines = [
        f"{row.state}: {_models(row.models)}: {row.name}: {detail(row, verbose)}"
        for state in states
        for row in plan.of(state)
    ]
    counted = len({row.name for row in plan.of(PARTLY)}), len({row.name for row in plan.of(OUTSIDE)})
    if not verbose and any(counted):
        lines.append(
            f"not listed: {counted[0]} ops that families cover, but not by all their kernels, and "
            f"{counted[1]} ops outside the forward pass (--verbose)"
        )
    return lines


def invalid(plan: Plan, problems: Iterable[Problem]) -> list[str]:
    """One line per problem with what would be written: where to, and the models and constants that it is from."""
    rows = {row.name: row for row in plan.rows if row.path is not None}
    lines = []
    for problem in problems:
        row = rows.get(Path(problem.file).stem)
        if row is None:
            lines.append(format_text(Result(0, [problem])))
            continue
        axes = json.loads(row.text)["axes"].items()
        constants = ", ".join(f"{name} {axis['value']}" for name, axis in axes if axis["type"] == "const")
        origin = f"{_models(row.models)} ({constants or 'no const axes'})"
        lines.append(f"{origin}: {problem.rule}: {problem.message}; for {row.path}")
    return lines


def detail(row: Row, verbose: bool) -> str:
    """The detail of a row; a long list of kernels is cut between names and ends with the number omitted."""
    if verbose or len(row.detail) <= MAX_DETAIL:
        return row.detail
    shown = row.detail[:MAX_DETAIL].rpartition(", ")[0]
    if not shown:
        return f"{row.detail[:MAX_DETAIL].rpartition(' ')[0]} ... (--verbose)"
    more = row.detail[len(shown) :].count(", ")
    return f"{shown} and {more} more (--verbose)"


def totals(plan: Plan) -> str:
    """How many rows have each state."""
    counts = Counter(row.state for row in plan.rows)
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, *cells[len(widths) :]]).rstrip()


def _models(names: tuple[str, ...]) -> str:
    more = len(names) - MAX_MODELS
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:MAX_MODELS])} and {more} more"
