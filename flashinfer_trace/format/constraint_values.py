"""Evaluates checked constraints (see `format.constraints`) by walking syntax trees, never with ``eval``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "MAX_MAGNITUDE",
    "ConstraintError",
    "ConstraintValueError",
    "Number",
    "evaluate",
    "is_minimum",
    "literal_index",
    "number",
]

#: Largest magnitude of any literal or intermediate result. Axes are below 2**31, so the product of two still fits.
MAX_MAGNITUDE = 2**64

Number = int | float

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class ConstraintError(ValueError):
    """Base class of the errors about constraints."""


class ConstraintValueError(ConstraintError):
    """A well-formed constraint cannot be computed: a name is missing, an index is out of range, a division by zero."""


def evaluate(node: ast.Compare, env: Mapping[str, Any], seen: dict[str, Number]) -> bool:
    """Whether a checked comparison holds. `seen` collects each value that was read, keyed by the text that reads it."""
    left, right = (number(side, env, seen) for side in (node.left, node.comparators[0]))
    return COMPARISONS[type(node.ops[0])](left, right)


def number(node: ast.expr, env: Mapping[str, Any], seen: dict[str, Number]) -> Number:
    """Value of one side of a checked comparison."""
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, number(node.left, env, seen), number(node.right, env, seen))
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]  # the checker accepts only integers
    if isinstance(node, ast.Name):
        return seen.setdefault(node.id, _scalar(node.id, _look_up(node.id, env)))
    if isinstance(node, ast.Subscript):
        assert isinstance(node.value, ast.Name)
        name, index = node.value.id, literal_index(node)
        return seen.setdefault(f"{name}[{index}]", _element(name, _look_up(name, env), index or 0))
    assert isinstance(node, ast.Call)
    if is_minimum(node):
        return min(*(number(operand, env, seen) for operand in node.args))
    assert isinstance(node.func, ast.Attribute)
    return number(node.func.value, env, seen)


def _arithmetic(node: ast.BinOp, left: Number, right: Number) -> Number:
    try:
        result: Number = ARITHMETIC[type(node.op)](left, right)
    except ZeroDivisionError:
        raise ConstraintValueError(f"{ast.unparse(node)} divides by zero") from None
    # Every operand is bounded, so one operation on two of them stays small; its result must be bounded as well.
    if abs(result) > MAX_MAGNITUDE:
        raise ConstraintValueError(f"{ast.unparse(node)} is larger than 2**64")
    return result


def _look_up(name: str, env: Mapping[str, Any]) -> Any:
    if name not in env:
        raise ConstraintValueError(f"{name} has no value")
    return env[name]


def _scalar(name: str, value: Any) -> Number:
    if not isinstance(value, (int, float)):
        shape = getattr(value, "shape", None)
        if not hasattr(value, "item") or (shape is not None and tuple(shape) not in ((), (1,))):
            raise ConstraintValueError(f"{name} is not one number but {_kind(value)}")
        value = value.item()
    if not isinstance(value, (int, float)):
        raise ConstraintValueError(f"{name} is not a number but {_kind(value)}")
    if math.isfinite(value) and abs(value) > MAX_MAGNITUDE:
        raise ConstraintValueError(f"{name} is larger than 2**64")
    return value


def _length(name: str, value: Any) -> int:
    shape = getattr(value, "shape", None)
    if shape is not None:
        if len(shape) == 0:
            raise ConstraintValueError(f"{name} is a scalar and has no length")
        return int(shape[0])
    if not isinstance(value, (list, tuple)):
        raise ConstraintValueError(f"{name} is {_kind(value)} and has no length")
    return len(value)


def _element(name: str, value: Any, index: int) -> Number:
    length = _length(name, value)
    if not -length <= index < length:
        raise ConstraintValueError(f"{name}[{index}] is out of range; {name} has {length} elements")
    return _scalar(f"{name}[{index}]", value[index])


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")


def is_minimum(node: ast.Call) -> bool:
    """Whether a call is one of ``min``, the only function of the language."""
    return isinstance(node.func, ast.Name) and node.func.id == "min"


def literal_index(node: ast.Subscript) -> int | None:
    index = node.slice
    sign = 1
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        sign, index = -1, index.operand
    if isinstance(index, ast.Constant) and type(index.value) is int and index.value <= MAX_MAGNITUDE:
        return sign * index.value
    return None
