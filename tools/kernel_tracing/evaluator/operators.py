"""Operators and comparisons."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    SIZE,
    UNKNOWN,
    Choice,
    Class,
    External,
    Instance,
    Tensor,
    Value,
    choice,
    is_symbolic,
)

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
}


_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


_SPECIAL = {"Add": "__add__", "Sub": "__sub__", "Mult": "__mul__", "BitOr": "__or__", "BitAnd": "__and__"}


def plain(value: Value) -> Value:
    """The value of an enumeration's member that also is a number or a string; other values as they are."""
    if isinstance(value, Instance) and value.cls.kind == "enum" and value.cls.externals & _MIXED:
        return value.fields.get("value", UNKNOWN)
    return value


_MIXED = frozenset({"enum.IntEnum", "enum.StrEnum", "enum.IntFlag", "builtins.str", "builtins.int"})


class Operators(Core):
    """Operators and comparisons."""

    def binary(self, kind: type[ast.operator], left: Value, right: Value) -> Value:
        """`left kind right`."""
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Tensor):
                shape = one.shape if not isinstance(other, Tensor) or kind is not ast.MatMult else None
                moved = one.data if isinstance(other, int) and kind in (ast.Add, ast.Sub) and one is left else None
                data = tuple(_BINARY[kind](each, other) for each in moved) if moved is not None else None
                return Tensor(shape, one.dtype, data)
        if isinstance(left, Choice):
            return choice([self.binary(kind, one, right) for one in left.values])
        if isinstance(right, Choice):
            return choice([self.binary(kind, left, one) for one in right.values])
        if kind is ast.BitOr and isinstance(right, (Class, External, type, tuple)):
            return (left, right)  # a union of types
        left, right = plain(left), plain(right)
        if isinstance(left, Instance):
            method = left.cls.find(_SPECIAL.get(kind.__name__, ""))
            return (
                self.call(self.load(left, _SPECIAL[kind.__name__]), [right], {}) if method is not MISSING else UNKNOWN
            )
        if is_symbolic(left) or is_symbolic(right) or kind not in _BINARY:
            return UNKNOWN
        try:
            if kind is ast.Mod and isinstance(left, str):
                return UNKNOWN
            if kind is ast.Pow and isinstance(right, int) and right > 4096:
                return UNKNOWN
            return _BINARY[kind](left, right)
        except (TypeError, ValueError, ArithmeticError):
            return UNKNOWN

    def compare(self, kind: ast.cmpop, left: Value, right: Value) -> Value:
        """`left kind right`; UNKNOWN if it is not decided."""
        if isinstance(left, Choice) or isinstance(right, Choice):
            lefts = left.values if isinstance(left, Choice) else (left,)
            rights = right.values if isinstance(right, Choice) else (right,)
            found = [self.compare(kind, one, other) for one in lefts for other in rights]
            return found[0] if all(one is found[0] for one in found) else UNKNOWN
        if isinstance(kind, (ast.Eq, ast.NotEq)) and left is SIZE and isinstance(right, int) and right == 0:
            return isinstance(kind, ast.NotEq)
        if isinstance(kind, (ast.Is, ast.Eq)):
            return self.equal(left, right)
        if isinstance(kind, (ast.IsNot, ast.NotEq)):
            equal = self.equal(left, right)
            return (not equal) if isinstance(equal, bool) else UNKNOWN
        if isinstance(kind, (ast.In, ast.NotIn)):
            contained = self.contains(right, left)
            return contained if isinstance(kind, ast.In) or not isinstance(contained, bool) else not contained
        left, right = plain(left), plain(right)
        if left is SIZE and right == 0 and not is_symbolic(right):
            return isinstance(kind, (ast.Gt, ast.GtE))  # a step has tokens
        if isinstance(left, Instance):
            name = {"Lt": "__lt__", "LtE": "__le__", "Gt": "__gt__", "GtE": "__ge__"}[type(kind).__name__]
            if left.cls.find(name) is not MISSING:
                return self.call(self.load(left, name), [right], {})
        try:
            if not (is_symbolic(left) or is_symbolic(right)):
                return _ORDER[type(kind)](left, right)
        except TypeError:
            pass
        return UNKNOWN

    def contains(self, container: Value, value: Value) -> Value:
        """`value in container`."""
        if isinstance(container, Instance) and container.cls.find("__contains__") is not MISSING:
            return self.call(self.load(container, "__contains__"), [value], {})
        value = plain(value)
        if isinstance(container, str):
            return value in container if isinstance(value, str) else UNKNOWN
        elements = self.iterate(container)
        if elements is None:
            return UNKNOWN
        found = [self.truth(self.equal(element, value)) for element in elements]
        return True if True in found else UNKNOWN if None in found else False
