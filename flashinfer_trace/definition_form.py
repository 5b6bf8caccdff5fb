"""Whether a Definition that was read has the types that its fields promise, so that nothing fails on them later."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.naming import MAX_NAME

__all__ = ["well_formed"]

#: Longest constraint or tag; schema/definition.schema.json allows less.
MAX_LINE = 1000


def well_formed(definition: Definition) -> Definition:
    """The Definition itself.

    Raises:
        InputError: a field has another type than `Definition` says, or a name or a line is too long to be shown, as one
            from a file that nobody validated may be.
    """
    for place in _misfits(definition):
        where = definition.path or "Definition"
        raise InputError(f"{where}: not a Definition ({place}); `flashinfer-trace validate` shows why")
    return definition


def _misfits(definition: Definition) -> Iterator[str]:
    """What has the wrong type or is too long to be shown in a line, in words."""
    for field in ("name", "op_type"):
        value = getattr(definition, field)
        if not _is_text(value, MAX_NAME) or not value or not value.isprintable():
            yield f"{field} is not a name of at most {MAX_NAME} characters"
    for field in ("description", "reference"):
        if not _is_text(getattr(definition, field)):
            yield f"{field} is not a string"
    for field in ("constraints", "tags"):
        if not all(_is_text(value, MAX_LINE) for value in getattr(definition, field)):
            yield f"{field} is not a list of strings of at most {MAX_LINE} characters"
    for axis in definition.axes.values():
        if not _is_size(axis.value):
            yield f"the value of axis {axis.name[:MAX_NAME]} is not an integer"
        if not _is_text(axis.name, MAX_NAME) or not _is_text(axis.description):
            yield f"name or description of axis {axis.name[:MAX_NAME]} is not a string, or too long"
    for spec in (*definition.inputs.values(), *definition.outputs.values()):
        if not all(_is_text(text, MAX_NAME) for text in (spec.name, spec.dtype, *(spec.shape or ()))):
            yield f"name, shape or dtype of {spec.name[:MAX_NAME]} is not of names of at most {MAX_NAME} characters"
        if not _is_text(spec.description):
            yield f"the description of {spec.name[:MAX_NAME]} is not a string"


def _is_text(value: object, longest: float = math.inf) -> bool:
    return isinstance(value, str) and len(value) <= longest


def _is_size(value: object) -> bool:
    return value is None or type(value) is int  # a bool is no size
