"""The plan as a table."""

from __future__ import annotations

from collections import Counter

from tools.extract_definitions.plan import STATES, Plan, Row

MAX_MODELS = 4
#: Characters of a detail that are shown without --verbose.
MAX_DETAIL = 160


def table(plan: Plan, verbose: bool = False) -> str:
    """One line per Definition or op: state, name, models, detail; then the sizes left out, and the totals."""
    cells = [
        (row.state, row.name, _models(row.models), detail(row, verbose)) for state in STATES for row in plan.of(state)
    ]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in range(3)]
    headings = ("State", "Definition or op", "Models", "Detail")
    widths = [max(width, len(heading)) for width, heading in zip(widths, headings, strict=False)]
    lines = [_line(cell, widths) for cell in (headings, tuple("-" * width for width in (*widths, 6)), *cells)]
    lines += [f"left out: {note}" for note in plan.notes]
    return "\n".join([*lines, totals(plan)])


def detail(row: Row, verbose: bool) -> str:
    """The detail of a row; a long list of kernels is cut between names and ends with the number omitted."""
    if verbose or len(row.detail) <= MAX_DETAIL:
        return row.detail
    shown = row.detail[:MAX_DETAIL].rpartition(", ")[0]
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
