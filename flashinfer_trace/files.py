"""Writing files so that nothing is ever half-written, and the one place that lays out JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["COMPACT", "SPACED", "Lines", "json_text", "laid_out", "write_json", "write_text"]

#: Separators of members and of keys on one line.
COMPACT, SPACED = (",", ":"), (", ", ": ")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text to a temporary file beside `path`, then renames it over `path`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, document: Any) -> None:
    """`write_text` of `json_text`."""
    write_text(path, json_text(document))


def json_text(document: Any) -> str:
    """JSON with two-space indentation, keys in the order given, a newline at the end.

    Raises:
        ValueError: it holds a NaN or an infinity, which JSON does not have.
    """
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Lines:
    """How an object or a list is spread over lines.

    Attributes:
        indent: blanks before each member, which gets a line of its own; None keeps the members on one line, but asks
            for the layout of each.
        first: whether a line break follows the opening bracket.
        closing: blanks before the closing bracket, which gets a line of its own; None puts it behind the last member.
    """

    indent: int | None
    first: bool = True
    closing: int | None = None


#: Keys from the document down to a value ("*" for an item of a list), and the value -> how it is spread; None for one
#: line.
Layout = Callable[[tuple[str, ...], Any], Lines | None]


def laid_out(document: Any, layout: Layout, separators: tuple[str, str] = SPACED) -> str:
    """JSON in a layout of its own, so that diffs of large files stay small and readable. A newline stands at the end.

    Args:
        document: what ``json.dumps`` takes.
        layout: which objects and lists are spread over lines. Empty ones never are.
        separators: between members and after keys where they stand on one line; after a key that begins a line there
            is always a blank.

    Raises:
        ValueError: it holds a NaN or an infinity, which JSON does not have.
    """
    return _laid_out(document, (), layout, separators) + "\n"


def _laid_out(value: Any, path: tuple[str, ...], layout: Layout, separators: tuple[str, str]) -> str:
    lines = layout(path, value) if value and isinstance(value, (dict, list)) else None
    if lines is None:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
    if isinstance(value, dict):
        colon = separators[1] if lines.indent is None else ": "
        members = [
            f"{json.dumps(key, ensure_ascii=False)}{colon}{_laid_out(member, (*path, key), layout, separators)}"
            for key, member in value.items()
        ]
    else:
        members = [_laid_out(item, (*path, "*"), layout, separators) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    if lines.indent is None:
        return opening + separators[0].join(members) + closing
    line = "\n" + " " * lines.indent
    end = "" if lines.closing is None else "\n" + " " * lines.closing
    return opening + (line if lines.first else "") + f",{line}".join(members) + end + closing
