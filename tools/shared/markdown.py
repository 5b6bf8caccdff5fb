"""Markdown that shows any text literally: escapes, code spans, tables, links to source lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# An underscore inside a word does not start emphasis, so it is not escaped and names stay readable.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)")


def escape(text: str) -> str:
    """Escapes Markdown and HTML in a text and keeps it on one line; not for the start of a line."""
    return _SPECIAL.sub(lambda match: f"\\{match[0]}", " ".join(text.split()))


def code(text: str) -> str:
    """A code span, with a longer fence if the text contains backticks. Pipes are escaped, as tables require."""
    text = " ".join(text.split())
    if not text:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", "\\|")


def link(label: str, target: str) -> str:
    """A link; `target` is a complete address."""
    return f"[{escape(label)}]({target})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], alignment: str = "") -> list[str]:
    """Lines of a table.

    Args:
        header, rows: the cells, already as Markdown.
        alignment: "l" or "r" for each column; if omitted, all columns are left-aligned.
    """
    rule = "".join("---:|" if letter == "r" else "---|" for letter in alignment or "l" * len(header))
    return [f"| {' | '.join(header)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]


def slug(text: str) -> str:
    """The text as the name of an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"
