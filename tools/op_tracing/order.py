"""Execution order within one function: operands before operators, arguments before calls, tests before branches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.kernel_tracing.source.declarations import FunctionInfo

# Fields in the order in which Python evaluates them, where it differs from the order in which ast lists them.
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("value", "target"),
    ast.AugAssign: ("target", "value"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.AsyncFor: ("iter", "target", "body", "orelse"),
    ast.NamedExpr: ("value", "target"),
    ast.IfExp: ("test", "body", "orelse"),
    ast.ListComp: ("generators", "elt"),
    ast.SetComp: ("generators", "elt"),
    ast.GeneratorExp: ("generators", "elt"),
    ast.DictComp: ("generators", "key", "value"),
    ast.comprehension: ("iter", "target", "ifs"),
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def execution_order(function: FunctionInfo) -> dict[ast.AST, tuple[int, str]]:
    """Every node of a function's body -> its position, and the loop around it ("" if none).

    The bodies of nested functions are excluded, because they run when those functions are called.
    """
    node = function.node
    body = node.body if isinstance(node.body, list) else [node.body]
    positions: dict[ast.AST, tuple[int, str]] = {}
    for statement in body:
        for inner, loop in _evaluated(statement, ""):
            positions[inner] = (len(positions), loop)
    return positions


def _evaluated(node: ast.AST, loop: str) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, _SCOPES):
        yield node, loop
        return
    inside = _loop_text(node) or loop
    for name in _FIELDS.get(type(node), node._fields):
        value = getattr(node, name, None)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _evaluated(part, inside if name in ("body", "elt", "key", "value") else loop)
    yield node, loop


def _loop_text(node: ast.AST) -> str:
    """`for layer in self.layers` for a loop or a comprehension."""
    generator = getattr(node, "generators", [None])[0]
    over = node if isinstance(node, (ast.For, ast.AsyncFor)) else generator
    if over is None:
        return f"while {ast.unparse(node.test)}" if isinstance(node, ast.While) else ""
    return f"for {ast.unparse(over.target)} in {ast.unparse(over.iter)}"
