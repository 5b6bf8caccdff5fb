"""Enumerations: their members, and the members for which a predicate is true."""

from __future__ import annotations

import ast

from tools.kernel_tracing.configuration.names import Names
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.syntax import dotted_name

_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
_MAX_DEPTH = 4


def is_enum(index: Index, info: ClassInfo) -> bool:
    """Whether a class is an enumeration."""
    return is_plain_enum(info) or any(path.rpartition(".")[2] in _ENUMS for path in index.external_bases(info))


def is_plain_enum(info: ClassInfo) -> bool:
    """Whether a class derives directly from a kind of Enum, which is known without parsing other modules."""
    return any(dotted_name(base).rpartition(".")[2] in _ENUMS for base in info.node.bases)


def members_of(owner: ClassInfo) -> dict[str, object]:
    """Members of an enumeration, with their values if these are literals."""
    return {
        target.id: node.value.value if isinstance(node.value, ast.Constant) else None
        for node in owner.node.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    }


def true_members(names: Names, predicate: FunctionInfo, call: ast.Call | None, depth: int = 0) -> list[str]:
    """Members of an enumeration for which one of its predicates is true; empty if the predicate is not understood."""
    value = returned(predicate)
    owner = predicate.owner
    if value is None or owner is None or depth > _MAX_DEPTH:
        return []
    return _true_of(names, value, predicate, _true_flags(predicate, call), depth) or []


def _true_of(names: Names, test: ast.expr, predicate: FunctionInfo, flags: set[str], depth: int) -> list[str] | None:
    """Members for which one expression is true; None if it is not understood."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        found = [_true_of(names, operand, predicate, flags, depth) for operand in test.values]
        return None if None in found else [name for some in found for name in some or []]
    if isinstance(test, ast.BoolOp) and len(test.values) == 2 and isinstance(test.values[0], ast.Name):
        # `include_v2 and self == E.V2`: a parameter that admits more members.
        return _true_of(names, test.values[1], predicate, flags, depth) if test.values[0].id in flags else []
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and dotted_name(test.left) == "self":
        right = test.comparators[0]
        if isinstance(test.ops[0], (ast.Eq, ast.Is)) and isinstance(right, ast.Attribute):
            return [right.attr]
        if isinstance(test.ops[0], ast.In):
            elements = names.elements(right, predicate)
            listed = [one.attr for one in elements if isinstance(one, ast.Attribute)]
            return listed if listed and len(listed) == len(elements) else None
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and predicate.owner is not None:
        other = predicate.owner.methods.get(test.func.attr)
        if other is not None and dotted_name(test.func.value) == "self":
            return true_members(names, other, test, depth + 1) or None
    return None


def returned(function: FunctionInfo) -> ast.expr | None:
    """The expression that a function returns, if it does nothing else."""
    if isinstance(function.node, ast.Lambda):
        return function.node.body
    body = [
        node
        for node in getattr(function.node, "body", [])
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None


def _true_flags(predicate: FunctionInfo, call: ast.Call | None) -> set[str]:
    """Parameters of a predicate that a call sets to True."""
    if call is None:
        return set()
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    given |= dict(zip(predicate.parameters[1:], call.args, strict=False))
    return {name for name, value in given.items() if not (isinstance(value, ast.Constant) and not value.value)}
