"""Functions as values: made from their definitions."""

from __future__ import annotations

import ast
from typing import Any

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.values import Function, Value

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def function_of(core: Core, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Function:
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
    return Function(node, scope, frame.module, qualname, None, defaults, is_generator=yields(node))


def yields(node: ast.AST) -> bool:
    """Whether a function is a generator."""
    if isinstance(node, ast.Lambda):
        return False
    known: Any = getattr(node, "_yields", None)
    if known is None:
        known = _yields(node)
        node._yields = known  # type: ignore[attr-defined]
    return bool(known)


def _yields(node: ast.AST) -> bool:
    pending = list(getattr(node, "body", []))
    while pending:
        part = pending.pop()
        if isinstance(part, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(part, (*_FUNCTIONS, ast.ClassDef)):
            pending.extend(ast.iter_child_nodes(part))
    return False
