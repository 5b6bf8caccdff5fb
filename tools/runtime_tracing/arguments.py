"""The arguments of a call as one line of text: shapes and dtypes of tensors, and plain values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Longest text of one value, and most items shown of a sequence.
LONGEST, MOST = 80, 6


def describe(value: Any) -> str | None:
    """A tensor as ``bfloat16[17,4096]``, a plain value as Python writes it, None for what says nothing."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(str(size) for size in value.shape)}]"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)[:LONGEST]
    if str(type(value)) == "<class 'torch.dtype'>":
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list)):
        items = [describe(item) for item in value[:MOST]]
        known = [item for item in items if item is not None]
        if len(known) == len(items):
            return f"({', '.join(known)}{', ...' if len(value) > MOST else ''})"
    return None


def arguments_text(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], numbers: bool = True) -> str:
    """``name: value`` for every argument that `describe` knows; beyond the names, positions are counted from 0.

    Args:
        numbers: False leaves out integers: most of those of a Triton kernel are strides and sizes of its tensors.
    """
    labels = [names[index] if index < len(names) else str(index) for index in range(len(args))]
    given = [*zip(labels, args, strict=True), *kwargs.items()]
    if not numbers:
        given = [(name, value) for name, value in given if type(value) is not int]
    return ", ".join(f"{name}: {text}" for name, value in given if (text := describe(value)) is not None)


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional parameters; none if it has no signature."""
    try:
        return _names(function)
    except TypeError:  # not hashable
        return ()


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters if one.kind in positional)
