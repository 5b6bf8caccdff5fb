"""How a function wants to be called: with which arguments, by name or by position. Runs in the submission's process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

__all__ = ["Convention", "LoadError", "convention"]


class LoadError(Exception):
    """A submission without a function that can be called. The message says what is there, and what it takes."""


@dataclass(frozen=True)
class Convention:
    """How to call a function.

    Attributes:
        by_name: whether arguments go by name; otherwise in the Definition's order.
        writes: whether outputs are among them, to write into.
        targets: the parameters that take the outputs, in the Definition's order; empty if they have no names.
    """

    by_name: bool
    writes: bool
    targets: tuple[str, ...] = field(default=(), compare=False)


def convention(found: Any, inputs: Sequence[str], outputs: Sequence[str], destination: bool | None) -> Convention:
    """How a function or module object is called.

    Args:
        found: the function.
        inputs, outputs: names, in the Definition's order.
        destination: whether it writes into outputs, as a Solution says; None to read that from its parameters.

    Raises:
        LoadError: it does not take them.
    """
    function = found.forward if hasattr(found, "forward") else found
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function that is not written in Python
        return Convention(by_name=False, writes=bool(destination))
    writes = _writes(parameters, inputs, outputs) if destination is None else destination
    passed = [*inputs, *outputs] if writes else [*inputs]
    targets = tuple(outputs) if writes else ()
    if _takes_by_name(parameters, passed):
        return Convention(True, writes, targets)
    others = _other_names(parameters, inputs, outputs) if writes else ()
    if others and _takes_by_name(parameters, [*inputs, *others]):
        return Convention(True, writes, others)
    if _takes_by_position(parameters, len(passed)):
        return Convention(False, writes, tuple(one.name for one in _positional(parameters)[len(inputs) : len(passed)]))
    if _takes_any_name(parameters, passed):
        return Convention(True, writes, targets)
    raise LoadError(_mismatch(parameters, inputs, outputs, destination))


def _writes(parameters: Sequence[Parameter], inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    """Whether a function takes outputs: by their names, or because it needs as many arguments as there are of both."""
    needed = sum(map(_needed, parameters))
    return bool(outputs) and (_names(parameters).issuperset(outputs) or needed == len(inputs) + len(outputs))


def _names(parameters: Sequence[Parameter]) -> set[str]:
    """The parameters that an argument may name."""
    return {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def _takes_by_name(parameters: Sequence[Parameter], passed: Sequence[str]) -> bool:
    """Whether a function can be called with these names and nothing else, each of which is one of its parameters."""
    return _names(parameters).issuperset(passed) and _needs_only(parameters, passed)


def _other_names(parameters: Sequence[Parameter], inputs: Sequence[str], outputs: Sequence[str]) -> tuple[str, ...]:
    """The parameters that take the outputs if inputs go by name, whatever names outputs have; empty if it is not clear.

    Those of the names of outputs take these, and the others the rest, in order.
    """
    free = [one.name for one in parameters if _needed(one) and one.name not in (*inputs, *outputs)]
    unnamed = [name for name in outputs if name not in _names(parameters)]
    if len(free) != len(unnamed):
        return ()
    renamed = dict(zip(unnamed, free, strict=True))
    return tuple(renamed.get(name, name) for name in outputs)


def _takes_any_name(parameters: Sequence[Parameter], passed: Sequence[str]) -> bool:
    """Whether names that are none of its parameters go into ``**kwargs``; with ``*args`` beside it, they need none."""
    kinds = {one.kind for one in parameters}
    variadic = Parameter.VAR_KEYWORD in kinds and Parameter.VAR_POSITIONAL not in kinds
    return variadic and _needs_only(parameters, passed)


def _needs_only(parameters: Sequence[Parameter], passed: Sequence[str]) -> bool:
    """Whether every parameter that needs an argument gets one by name."""
    names = _names(parameters).intersection(passed)
    return all(one.name in names for one in parameters if _needed(one))


def _takes_by_position(parameters: Sequence[Parameter], count: int) -> bool:
    """Whether a function can be called with so many arguments and no names."""
    positional = _positional(parameters)
    unlimited = any(one.kind == one.VAR_POSITIONAL for one in parameters)
    if any(_needed(one) for one in parameters if one.kind == one.KEYWORD_ONLY):
        return False
    return sum(map(_needed, positional)) <= count and (unlimited or count <= len(positional))


def _positional(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def _needed(parameter: Parameter) -> bool:
    """Whether a parameter needs an argument."""
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return not variadic and parameter.default is parameter.empty


def _mismatch(
    parameters: Sequence[Parameter], inputs: Sequence[str], outputs: Sequence[str], destination: bool | None
) -> str:
    """What a function takes, and what it must take."""
    stars: dict[object, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
    takes = f"it takes {[stars.get(one.kind, '') + one.name for one in parameters]}"
    if destination is None:
        return (
            f"{takes}; it must take the inputs {list(inputs)}, and may take the outputs {list(outputs)} after them, to "
            f"write into"
        )
    if destination:
        return (
            f"{takes}; destination_passing_style is true, so that it must take the inputs {list(inputs)} and after "
            f"them the outputs {list(outputs)}, to write into; if it returns the outputs, set it to false in the "
            f"Solution's spec"
        )
    return (
        f"{takes}; destination_passing_style is false, so that it must take the inputs {list(inputs)} alone and return "
        f"the outputs; if it writes into outputs that it takes, set it to true in the Solution's spec"
    )
