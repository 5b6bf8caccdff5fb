"""Walking syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def walk_scopes(root: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """All expressions and statements below `root`, in no particular order, and whether they are in a nested scope.

    Several times faster than ast.walk, which would take most of the analysis's time.
    """
    pending: list[tuple[ast.AST, bool]] = [(root, False)]
    while pending:
        node, nested = pending.pop()
        if node is not root:
            yield node, nested
            nested = nested or isinstance(node, _SCOPES)
        kind = type(node)
        fields = _FIELDS.get(kind)
        if fields is None:
            fields = _FIELDS[kind] = tuple(name for name in node._fields if name not in _LEAVES)
        for name in fields:
            value = getattr(node, name, None)
            if type(value) is list:
                for item in value:
                    if isinstance(item, ast.AST):
                        pending.append((item, nested))
            elif isinstance(value, (ast.expr, ast.stmt, ast.arguments)):
                pending.append((value, nested))


# Fields that contain no expressions or statements in any node.
_LEAVES = {"arg", "attr", "conversion", "ctx", "id", "is_async", "kind", "level", "module", "op", "ops", "type_comment"}
_FIELDS: dict[type[ast.AST], tuple[str, ...]] = {}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """All expressions and statements below `root`, in no particular order."""
    return (node for node, _ in walk_scopes(root))


def dotted_name(expression: ast.AST) -> str:
    """`a.b.c` for such an expression, "" for any other."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        base = dotted_name(expression.value)
        return f"{base}.{expression.attr}" if base else ""
    return ""


def last_name(expression: ast.AST | None) -> str:
    """`c` for `a.b.c`, `f().c` and `c`, "" for any other expression."""
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""
