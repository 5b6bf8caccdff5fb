"""Values of checked constraints (see `flashinfer_trace.constraints`): walks the syntax tree, never ``eval``."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["MAX_MAGNITUDE", "ConstraintError", "ConstraintValueError", "Number", "evaluate", "literal_index"]

#: Largest magnitude of any literal or intermediate result. Axes are below 2**31, so products of two still fit.
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
    """Base of the errors of this module."""


class ConstraintValueError(ConstraintError):
    """A well-formed constraint cannot be computed: a name is missing, an index is out of range, a division by zero."""


def evaluate(node: ast.expr, env: Mapping[str, Any], seen: dict[str, Number]) -> Number | bool:
    """Value of a checked tree. `seen` collects each value that was read, under the text that reads it."""
    if isinstance(node, ast.BoolOp):
        conjunction = isinstance(node.op, ast.And)
        for value in node.values:
            if bool(evaluate(value, env, seen)) != conjunction:
                return not conjunction
        return conjunction
    if isinstance(node, ast.Compare):
        left = evaluate(node.left, env, seen)
        for comparison, operand in zip(node.ops, node.comparators, strict=True):
            right = evaluate(operand, env, seen)
            if not COMPARISONS[type(comparison)](left, right):
                return False
            left = right
        return True
    if isinstance(node, ast.UnaryOp):
        operand_value = evaluate(node.operand, env, seen)
        if isinstance(node.op, ast.Not):
            return not operand_value
        return -operand_value if isinstance(node.op, ast.USub) else operand_value
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, evaluate(node.left, env, seen), evaluate(node.right, env, seen))
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]  # the checker lets only numbers pass
    if isinstance(node, ast.Name):
        return seen.setdefault(node.id, _scalar(node.id, _look_up(node.id, env)))
    if isinstance(node, ast.Subscript):
        assert isinstance(node.value, ast.Name)
        name, index = node.value.id, literal_index(node)
        return seen.setdefault(f"{name}[{index}]", _element(name, _look_up(name, env), index or 0))
    assert isinstance(node, ast.Call)
    if isinstance(node.func, ast.Attribute):
        return evaluate(node.func.value, env, seen)
    assert isinstance(node.func, ast.Name)
    return _call(node.func.id, node.args, env, seen)


def _call(function: str, arguments: Sequence[ast.expr], env: Mapping[str, Any], seen: dict[str, Number]) -> Number:
    first = arguments[0]
    if len(arguments) == 1 and function != "abs":
        assert isinstance(first, ast.Name)
        value = _look_up(first.id, env)
        length = _length(first.id, value)
        if function == "len":
            return seen.setdefault(f"len({first.id})", length)
        if length == 0:
            raise ConstraintValueError(f"{first.id} is empty; guard {function}() with len({first.id}) == 0 or ...")
        # A tensor reduces itself, so that a million indices are one call and one synchronisation.
        reduced = getattr(value, function)() if hasattr(value, function) else (min if function == "min" else max)(value)
        return seen.setdefault(f"{function}({first.id})", _scalar(first.id, reduced))
    numbers = [evaluate(argument, env, seen) for argument in arguments]
    if function == "abs":
        return abs(numbers[0])
    return min(numbers) if function == "min" else max(numbers)


def _arithmetic(node: ast.BinOp, left: Number, right: Number) -> Number:
    try:
        result: Number = ARITHMETIC[type(node.op)](left, right)
    except ZeroDivisionError:
        raise ConstraintValueError(f"{ast.unparse(node)} divides by zero") from None
    except OverflowError:
        raise ConstraintValueError(f"{ast.unparse(node)} is too large") from None
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
            raise ConstraintValueError(f"{name} is a scalar, it has no length")
        return int(shape[0])
    if not isinstance(value, (list, tuple)):
        raise ConstraintValueError(f"{name} is {_kind(value)}, it has no length")
    return len(value)


def _element(name: str, value: Any, index: int) -> Number:
    length = _length(name, value)
    if not -length <= index < length:
        raise ConstraintValueError(f"{name}[{index}] is out of range, {name} has {length} elements")
    return _scalar(f"{name}[{index}]", value[index])


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")


def literal_index(node: ast.Subscript) -> int | None:
    index = node.slice
    sign = 1
    if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
        sign, index = -1, index.operand
    if isinstance(index, ast.Constant) and type(index.value) is int and index.value <= MAX_MAGNITUDE:
        return sign * index.value
    return None
