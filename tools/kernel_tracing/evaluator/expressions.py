"""Expressions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from tools.kernel_tracing.evaluator.core import Core, Test
from tools.kernel_tracing.evaluator.functions import function_of
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    SIZE,
    UNKNOWN,
    Choice,
    Class,
    External,
    Function,
    Instance,
    LibraryClass,
    Opaque,
    Scope,
    Tensor,
    TritonKernel,
    Unknown,
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


class Expressions(Core):
    """Evaluates expressions."""

    def evaluate(self, node: ast.expr) -> Value:
        handler = _HANDLERS.get(type(node))
        return handler(self, node) if handler is not None else UNKNOWN

    def _name(self, node: ast.Name) -> Value:
        return self.lookup(node.id)

    def _constant(self, node: ast.Constant) -> Value:
        return node.value

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.load(self.evaluate(node.value), node.attr)

    def _call(self, node: ast.Call) -> Value:
        function = self.evaluate(node.func)
        args: list[Value] = []
        kwargs: dict[str, Value] = {}
        for part in node.args:
            if isinstance(part, ast.Starred):
                spread = self.iterate(self.evaluate(part.value))
                args += spread if spread is not None else []
            else:
                args.append(self.evaluate(part))
        for keyword in node.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, dict):
                kwargs |= {key: one for key, one in value.items() if isinstance(key, str)}
        frame = self.frame
        line, call = frame.line, frame.call
        frame.line, frame.call = call_line(node), node
        try:
            return self.call(function, args, kwargs)
        finally:
            frame.line, frame.call = line, call

    def _tuple(self, node: ast.Tuple) -> Value:
        return tuple(self._elements(node.elts))

    def _list(self, node: ast.List) -> Value:
        return self._elements(node.elts)

    def _set(self, node: ast.Set) -> Value:
        try:
            return set(self._elements(node.elts))
        except TypeError:
            return UNKNOWN

    def _elements(self, nodes: list[ast.expr]) -> list[Value]:
        found: list[Value] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self.iterate(self.evaluate(node.value)) or []
            else:
                found.append(self.evaluate(node))
        return found

    def _dict(self, node: ast.Dict) -> Value:
        found: dict[Value, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            evaluated = self.evaluate(value)
            if key is None:
                found |= evaluated if isinstance(evaluated, dict) else {}
            else:
                try:
                    found[self.evaluate(key)] = evaluated
                except TypeError:
                    continue
        return found

    def _subscript(self, node: ast.Subscript) -> Value:
        return self.item(self.evaluate(node.value), self.evaluate(node.slice))

    def _slice(self, node: ast.Slice) -> Value:
        parts = [self.evaluate(part) if part is not None else None for part in (node.lower, node.upper, node.step)]
        return slice(*parts)

    def _binary(self, node: ast.BinOp) -> Value:
        return self.binary(type(node.op), self.evaluate(node.left), self.evaluate(node.right))

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

    def _unary(self, node: ast.UnaryOp) -> Value:
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            truth = self.truth(value)
            return UNKNOWN if truth is None else not truth
        if isinstance(value, Tensor):
            return Tensor(value.shape, value.dtype)
        value = plain(value)
        if isinstance(value, (int, float)):
            return (
                -value if isinstance(node.op, ast.USub) else ~int(value) if isinstance(node.op, ast.Invert) else value
            )
        return UNKNOWN

    def _boolean(self, node: ast.BoolOp) -> Value:
        stop = isinstance(node.op, ast.Or)
        open_values: list[Value] = []
        scope, before = self.frame.scope, self.frame.scope.names
        for operand in node.values:
            value = self.evaluate(operand)
            truth = self.truth(value)
            if truth is stop:
                open_values.append(value)
                break
            if truth is None or operand is node.values[-1]:
                open_values.append(value)
            if truth is None:
                scope.names = dict(scope.names)
                self.narrow(operand, stop)
        if scope.names is not before:
            before |= {name: value for name, value in scope.names.items() if name not in before}
            scope.names = before
        if stop and len(open_values) > 1 and self.truth(open_values[-1]):
            return choice([value for value in open_values]) if len(open_values) == 2 else UNKNOWN
        if not stop and len(open_values) > 1 and self.truth(open_values[-1]) is False:
            return False
        return choice(open_values)

    def _conditional(self, node: ast.IfExp) -> Value:
        truth = self.truth(self.evaluate(node.test))
        if truth is not None:
            return self.evaluate(node.body if truth else node.orelse)
        found: list[Value] = []
        frame = self.frame
        scope, before = frame.scope, frame.scope.names
        for branch, negated in ((node.body, False), (node.orelse, True)):
            scope.names = dict(before)
            if self.narrow(node.test, negated):
                frame.tests.append(Test(node.test, negated, True))
                with self.uncertain():
                    found.append(self.evaluate(branch))
                frame.tests.pop()
        scope.names = before
        return choice(found)

    def _compare(self, node: ast.Compare) -> Value:
        left = self.evaluate(node.left)
        result: Value = True
        for kind, part in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(part)
            found = self.compare(kind, left, right)
            truth = self.truth(found)
            if truth is False:
                return False
            result = found if truth is None else result
            left = right
        return result

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

    def _lambda(self, node: ast.Lambda) -> Value:
        return function_of(self, node)

    def _list_comprehension(self, node: ast.ListComp) -> Value:
        return self._comprehension(node.generators, lambda: self.evaluate(node.elt))

    def _set_comprehension(self, node: ast.SetComp) -> Value:
        found = self._comprehension(node.generators, lambda: self.evaluate(node.elt))
        try:
            return set(found) if isinstance(found, list) else UNKNOWN
        except TypeError:
            return UNKNOWN

    def _dict_comprehension(self, node: ast.DictComp) -> Value:
        pairs = self._comprehension(node.generators, lambda: (self.evaluate(node.key), self.evaluate(node.value)))
        try:
            return dict(pairs) if isinstance(pairs, list) else UNKNOWN
        except TypeError:
            return UNKNOWN

    def _comprehension(self, generators: list[ast.comprehension], element: Callable[[], Value]) -> Value:
        frame = self.frame
        outer = frame.scope
        frame.scope = Scope({}, outer, outer.module)
        found: list[Value] = []
        try:
            known = self._generate(generators, element, found)
        finally:
            frame.scope = outer
        return found if known else UNKNOWN

    def _generate(self, generators: list[ast.comprehension], element: Callable[[], Value], found: list[Value]) -> bool:
        """Collects the elements; False if their number is not known."""
        if not generators:
            found.append(element())
            return True
        first, *rest = generators
        values = self.iterate(self.evaluate(first.iter))
        known = values is not None
        for value in values if values is not None else [UNKNOWN]:
            self.assign(first.target, value)
            truths = [self.truth(self.evaluate(test)) for test in first.ifs]
            if False in truths:
                continue
            known = self._generate(rest, element, found) and known and None not in truths
        return known

    def _named(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.bind(node.target.id, value)
        return value

    def _formatted(self, node: ast.JoinedStr) -> Value:
        parts: list[str] = []
        for part in node.values:
            value = self.evaluate(part.value) if isinstance(part, ast.FormattedValue) else self.evaluate(part)
            value = plain(value)
            if not isinstance(value, (str, int, float)):
                return UNKNOWN
            parts.append(str(value))
        return "".join(parts)

    def _yield(self, node: ast.Yield) -> Value:
        value = self.evaluate(node.value) if node.value is not None else None
        if self.frame.on_yield is not None:
            self.frame.on_yield(value)
        else:
            self.frame.yielded.append(value)
        return UNKNOWN

    def _yield_from(self, node: ast.YieldFrom) -> Value:
        self.frame.yielded += self.iterate(self.evaluate(node.value)) or []
        return UNKNOWN

    def _await(self, node: ast.Await) -> Value:
        return self.evaluate(node.value)

    def _starred(self, node: ast.Starred) -> Value:
        return self.evaluate(node.value)


def plain(value: Value) -> Value:
    """The value of an enumeration's member that also is a number or a string; other values as they are."""
    if isinstance(value, Instance) and value.cls.kind == "enum" and value.cls.externals & _MIXED:
        return value.fields.get("value", UNKNOWN)
    return value


_MIXED = frozenset({"enum.IntEnum", "enum.StrEnum", "enum.IntFlag", "builtins.str", "builtins.int"})


def call_line(node: ast.Call) -> int:
    """The line that a traceback shows for a call: that of the method's name if the object ends on an earlier line."""
    if isinstance(node.func, ast.Attribute) and node.func.end_lineno is not None:
        return node.func.end_lineno
    return node.lineno


__all__ = ["Expressions", "Function", "LibraryClass", "Opaque", "TritonKernel", "Unknown", "call_line", "plain"]

_HANDLERS: dict[type[ast.expr], Callable[..., Value]] = {
    ast.Name: Expressions._name,
    ast.Constant: Expressions._constant,
    ast.Attribute: Expressions._attribute,
    ast.Call: Expressions._call,
    ast.Tuple: Expressions._tuple,
    ast.List: Expressions._list,
    ast.Set: Expressions._set,
    ast.Dict: Expressions._dict,
    ast.Subscript: Expressions._subscript,
    ast.Slice: Expressions._slice,
    ast.BinOp: Expressions._binary,
    ast.UnaryOp: Expressions._unary,
    ast.BoolOp: Expressions._boolean,
    ast.IfExp: Expressions._conditional,
    ast.Compare: Expressions._compare,
    ast.Lambda: Expressions._lambda,
    ast.ListComp: Expressions._list_comprehension,
    ast.SetComp: Expressions._set_comprehension,
    ast.GeneratorExp: Expressions._list_comprehension,
    ast.DictComp: Expressions._dict_comprehension,
    ast.NamedExpr: Expressions._named,
    ast.JoinedStr: Expressions._formatted,
    ast.Yield: Expressions._yield,
    ast.YieldFrom: Expressions._yield_from,
    ast.Await: Expressions._await,
    ast.Starred: Expressions._starred,
}
