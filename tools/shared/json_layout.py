"""JSON with line breaks at chosen places, so that the diffs of large generated files stay readable and small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["INLINE", "Layout", "Lines", "Place", "laid_out"]

#: Keys and indices that lead from the document to a value.
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Lines:
    """How the elements of one list or object are written.

    Attributes:
        before: what stands before each element: a line break and an indentation, or nothing.
        end: what stands before the closing bracket.
        first: what stands before the first element, if not `before`.
        colon: what separates a key from its value.
    """

    before: str
    end: str = ""
    first: str | None = None
    colon: str = ": "


#: An element on the line of the list or object that holds it, written compactly, although lines break inside it.
INLINE = Lines("", colon=":")

#: How the value at a place is broken into lines; None for a value that stays on one line.
Layout = Callable[[Place], Lines | None]


def laid_out(document: Any, layout: Layout, compact: bool = True) -> str:
    """The document as JSON text, with a line break at its end.

    Args:
        document: what `json` can write; NaN and infinities are refused (ValueError).
        layout: where lines break. The parts of a value that stays on one line are not asked for.
        compact: whether such values are written without spaces.
    """
    separators = (",", ":") if compact else (", ", ": ")

    def text(value: Any, place: Place) -> str:
        lines = layout(place) if isinstance(value, (dict, list)) else None
        if lines is None:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
        if isinstance(value, dict):
            elements = [f"{json.dumps(key)}{lines.colon}{text(one, (*place, key))}" for key, one in value.items()]
        else:
            elements = [text(one, (*place, number)) for number, one in enumerate(value)]
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        if not elements:
            return opening + closing
        first = lines.before if lines.first is None else lines.first
        return opening + first + f",{lines.before}".join(elements) + lines.end + closing

    return text(document, ()) + "\n"
