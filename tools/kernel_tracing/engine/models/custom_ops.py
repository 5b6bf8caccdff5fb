"""Torch custom operators: a Python function registered under a name, called as `torch.ops.<namespace>.<name>`.

A decorated function also keeps its name in Python, so a call by either name enters its body.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tools.kernel_tracing.engine.values import EMPTY, Constant, Function, Method, Partial, ValueSet

if TYPE_CHECKING:
    from tools.kernel_tracing.engine.frame import Arguments, Frame

_DECORATORS = {"custom_op", "register_custom_op", "triton_op"}
_FUNCTIONS = {"direct_register_custom_op"}
# These return a torch operator that does what the given function does.
_WRAPPERS = {"register_custom_op", "register_custom_op_from_extern"}


def is_custom_op_decorator(name: str) -> bool:
    """Whether a decorator of this name registers the function it decorates with torch."""
    return name in _DECORATORS


def is_registration(name: str) -> bool:
    """Whether a function of this name registers one of its arguments with torch."""
    return name in _FUNCTIONS


def register_decorated(frame: Frame, decorator: ast.expr, values: ValueSet) -> None:
    """`@register_custom_op(op_name=...)` or `@torch.library.custom_op("namespace::name")`."""
    from tools.kernel_tracing.engine import expressions

    names = []
    if isinstance(decorator, ast.Call):
        given = [*decorator.args[:1], *(word.value for word in decorator.keywords if word.arg in ("op_name", "name"))]
        names = _strings(frame, [expressions.evaluate(frame, argument) for argument in given])
    for value in values:
        if isinstance(value, (Function, Method)) and not isinstance(value.info.node, (ast.Module, ast.Lambda)):
            for name in names or [value.info.node.name]:
                frame.write(("custom op", name.rpartition(":")[2]), frozenset((value,)))


def register_called(frame: Frame, arguments: Arguments) -> None:
    """`direct_register_custom_op(op_name=..., op_func=...)`."""
    for name in _strings(frame, [arguments.get(0, "op_name")]):
        frame.write(("custom op", name.rpartition(":")[2]), arguments.get(1, "op_func"))


def wrap(frame: Frame, name: str, arguments: Arguments) -> ValueSet | None:
    """`fast = register_custom_op_from_extern(fast)`: the function itself, registered; None for any other call."""
    functions = frozenset(value for value in arguments.get(0, "fn") if isinstance(value, (Function, Method, Partial)))
    if name not in _WRAPPERS or not functions:
        return None
    names = _strings(frame, [arguments.keywords.get("op_name", EMPTY)])
    for value in functions:
        node = value.info.node if isinstance(value, (Function, Method)) else None
        own = [node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
        for registered in names or own:
            frame.write(("custom op", registered.rpartition(":")[2]), frozenset((value,)))
    return functions


def implementation(frame: Frame, path: str) -> ValueSet:
    """Python functions registered as `torch.ops.<namespace>.<name>[.overload]`."""
    parts = path.split(".")
    return frame.read(("custom op", parts[3])) if len(parts) > 3 else frozenset()


def _strings(frame: Frame, values: list[ValueSet]) -> list[str]:
    literals = [value.literal for group in values for value in group if isinstance(value, Constant)]
    return [literal for literal in literals if isinstance(literal, str)]
