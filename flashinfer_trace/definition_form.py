"""Whether a Definition that was read has the types that its fields promise, so that nothing fails on them later."""

from __future__ import annotations

from collections.abc import Iterator

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.naming import MAX_NAME

__all__ = ["well_formed"]


def well_formed(definition: Definition) -> Definition:
    """The Definition itself.

    Raises:
        InputError: a field has another type than `Definition` says, as one from a file that nobody validated may.
    """
    for place in _misfits(definition):
        where = definition.path or "Definition"
        raise InputError(f"{where}: not a Definition ({place}); `flashinfer-trace validate` shows why")
    return definition


def _misfits(definition: Definition) -> Iterator[str]:
    """What has the wrong type, in words."""
    for field in ("name", "op_type"):
        value = getattr(definition, field)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
            yield f"{field} is not a name of at most {MAX_NAME} characters"
    for field in ("description", "reference"):
        if not isinstance(getattr(definition, field), str):
            yield f"{field} is not a string"
    for field in ("constraints", "tags"):
        if not all(isinstance(value, str) for value in getattr(definition, field)):
            yield f"{field} is not a list of strings"
    for axis in definition.axes.values():
        if axis.value is not None and type(axis.value) is not int:  # a bool is no size
            yield f"the value of axis {axis.name[:MAX_NAME]} is not an integer"
        if not isinstance(axis.description, str):
            yield f"the description of axis {axis.name[:MAX_NAME]} is not a string"
    for spec in (*definition.inputs.values(), *definition.outputs.values()):
        if not isinstance(spec.dtype, str) or not isinstance(spec.description, str):
            yield f"dtype or description of {spec.name[:MAX_NAME]} is not a string"
        if not all(isinstance(axis, str) for axis in spec.shape or ()):
            yield f"the shape of {spec.name[:MAX_NAME]} is not a list of names of axes"
