"""Functions as values: made from their definitions."""

from __future__ import annotations

import ast
from typing import NamedTuple

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.values import Function, Value
from tools.kernel_tracing.source.declarations import FunctionNode
from tools.kernel_tracing.source.syntax import walk_scopes


def function_of(core: Core, node: FunctionNode) -> Function:
    """The function that a definition makes in the running frame; its defaults are evaluated."""
    frame = core.frame
    name = getattr(node, "name", "<lambda>")
    qualname = f"{frame.qualname}.{name}" if frame.qualname else name
    scope = frame.scope
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults: dict[str, Value] = {}
    for argument, default in zip(reversed(positional), reversed(spec.defaults), strict=False):
        defaults[argument.arg] = core.evaluate(default)
    for argument, keyword in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if keyword is not None:
            defaults[argument.arg] = core.evaluate(keyword)
    return Function(node, scope, frame.module, qualname, None, defaults)


class Signature(NamedTuple):
    """What a call needs to know of a function.

    Attributes:
        positional: names of the parameters that are given by position.
        named: names of all parameters but `*args` and `**kwargs`.
        rest, keywords: the names of those two; "" if there are none.
        is_generator: whether the function yields.
    """

    positional: tuple[str, ...]
    named: tuple[str, ...]
    rest: str
    keywords: str
    is_generator: bool


def signature(node: FunctionNode) -> Signature:
    """The signature of a function."""
    spec = node.args
    positional = tuple(argument.arg for argument in (*spec.posonlyargs, *spec.args))
    named = (*positional, *(argument.arg for argument in spec.kwonlyargs))
    rest = spec.vararg.arg if spec.vararg is not None else ""
    keywords = spec.kwarg.arg if spec.kwarg is not None else ""
    is_generator = not isinstance(node, ast.Lambda) and any(
        isinstance(part, (ast.Yield, ast.YieldFrom)) for part, nested in walk_scopes(node) if not nested
    )
    return Signature(positional, named, rest, keywords, is_generator)
