"""Whether parsed JSON has the types that the fields of a Definition promise, so that nothing fails on them later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from flashinfer_trace.format.naming import MAX_NAME

__all__ = ["field_errors"]

#: Longest constraint or tag; schema/definition.schema.json allows less.
MAX_LINE = 1000


def field_errors(data: object) -> Iterator[str]:
    """What is missing, has another type than `definition.Definition` says, or is too long to be shown in a line.

    Names and lines from a file that nobody validated may have any length; messages and tables show them.
    """
    if not isinstance(data, Mapping):
        yield "it is not an object"
        return
    missing = [field for field in ("name", "op_type", "axes", "inputs", "outputs", "reference") if field not in data]
    if missing:
        yield f"{missing[0]} is missing"
        return
    for field in ("name", "op_type"):
        if not _is_text(data[field], MAX_NAME) or not data[field] or not data[field].isprintable():
            yield f"{field} is not a name of at most {MAX_NAME} characters"
    if not _is_text(data["reference"]):
        yield "reference is not a string"
    if not _is_text(data.get("description") or ""):
        yield "description is not a string"
    for field in ("constraints", "tags"):
        lines = data.get(field) or []
        if not isinstance(lines, (list, tuple)) or not all(_is_text(line, MAX_LINE) for line in lines):
            yield f"{field} is not a list of strings of at most {MAX_LINE} characters"
    for section, misfits_of in (("axes", _of_axis), ("inputs", _of_tensor), ("outputs", _of_tensor)):
        entries = data[section]
        if not isinstance(entries, Mapping):
            yield f"{section} is not an object"
            continue
        for name, entry in entries.items():
            if not _is_text(name, MAX_NAME):
                yield f"{section} has a name that is not a string of at most {MAX_NAME} characters"
            elif not isinstance(entry, Mapping):
                yield f"{name} in {section} is not an object"
            else:
                yield from misfits_of(name, entry)
                if not _is_text(entry.get("description") or ""):
                    yield f"the description of {name} in {section} is not a string"


def _of_axis(name: str, axis: Mapping[str, Any]) -> Iterator[str]:
    value = axis.get("value")
    if value is not None and type(value) is not int:  # a bool is no size
        yield f"the value of axis {name} is not an integer"


def _of_tensor(name: str, tensor: Mapping[str, Any]) -> Iterator[str]:
    if "shape" not in tensor or "dtype" not in tensor:
        yield f"{name} has no {'dtype' if 'shape' in tensor else 'shape'}"
        return
    shape = tensor["shape"]
    axes = [] if shape is None else shape
    if not isinstance(axes, (list, tuple)) or not all(_is_text(text, MAX_NAME) for text in (tensor["dtype"], *axes)):
        yield f"shape or dtype of {name} is not of names of at most {MAX_NAME} characters"


def _is_text(value: object, longest: float = math.inf) -> bool:
    return isinstance(value, str) and len(value) <= longest
