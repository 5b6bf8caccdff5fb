"""Variants: arguments for which a function is analysed separately, so that its callers are not mixed up."""

from __future__ import annotations

import ast
import itertools
from typing import NamedTuple

from tools.kernel_tracing.engine.frame import Arguments, Frame
from tools.kernel_tracing.engine.solver import Context
from tools.kernel_tracing.engine.values import (
    EMPTY,
    ClassValue,
    Function,
    Instance,
    Method,
    Partial,
    Value,
    ValueSet,
)
from tools.kernel_tracing.source.declarations import FunctionInfo
from tools.kernel_tracing.source.syntax import is_none_test

# A function is analysed separately for at most this many combinations of its sensitive parameters.
MAX_VARIANTS = 150


class Choice(NamedTuple):
    """The value of a parameter in a variant."""

    parameter: str
    value: Value | None  # None: not given, or it may be None; Unknown: none of the distinguished values
    given: bool = True


class Variant(NamedTuple):
    """One way to enter a function."""

    arguments: dict[str, ValueSet]
    choices: tuple[Choice, ...]
    approximate: str = ""


def split(frame: Frame, function: FunctionInfo, bound: dict[str, ValueSet]) -> list[Variant]:
    """Split a call by the values of parameters that decide what the function calls."""
    options: list[list[tuple[Choice, ValueSet]]] = []
    count = 1
    for name in dict.fromkeys((*sorted(function.optional), *frame.solver.index.sensitive_parameters(function))):
        values = bound.get(name, EMPTY)
        told = [(Choice(name, value), frozenset((value,))) for value in values if _decides(value, function)]
        if name in function.optional:
            rest = values.difference(*(one for _, one in told))
            if name not in bound:
                told.append((Choice(name, None, given=False), EMPTY))
            elif rest:
                maybe_none = not told and rest == frame.universe.data
                told.append((Choice(name, None if maybe_none else frame.universe.unknown), rest))
            elif not told:
                return []  # given, but still unknown
        if told:
            count *= len(told)
            options.append(told)
    if count > MAX_VARIANTS:
        names = " and ".join(option[0][0].parameter for option in options)
        return [Variant(bound, (), f"called with more than {MAX_VARIANTS} values of {names}")]
    return [
        Variant({**bound, **{choice.parameter: values for choice, values in one}}, tuple(choice for choice, _ in one))
        for one in itertools.product(*options)
    ]


def _decides(value: Value, function: FunctionInfo) -> bool:
    """Whether to distinguish calls by this argument; a closure made by the function itself would nest for ever."""
    closure = value.closure if isinstance(value, Function) else None
    while closure is not None:
        if closure.function is function:
            return False
        closure = closure.closure
    return isinstance(value, (Instance, ClassValue, Function, Method, Partial))


def receivers(frame: Frame, function: FunctionInfo, closure: Context | None, arguments: Arguments) -> list[Value]:
    """For a wrapper that passes `*args` on to a method, the receivers for which to analyse it separately."""
    name = function.passes_to
    if not name or closure is None or not arguments.positional:
        return []
    wrapped = frame.read(("local", closure, name))
    if not any(isinstance(value, Function) and value.info.owner is not None for value in wrapped):
        return []
    return [value for value in arguments.positional[0] if isinstance(value, (Instance, ClassValue))]


def is_none(frame: Frame, node: ast.Compare) -> bool | None:
    """Whether `function is None` (or `is not None`) holds, in a decorator analysed separately for its argument."""
    if isinstance(node.left, ast.Name) and node.left.id in frame.function.optional and is_none_test(node):
        for choice in frame.context.variant:
            if isinstance(choice, Choice) and choice.parameter == node.left.id:
                if choice.given and choice.value is None:
                    return None
                return choice.given != isinstance(node.ops[0], ast.Is)
    return None
