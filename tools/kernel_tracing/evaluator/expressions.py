"""Expressions."""

from __future__ import annotations

import ast
from collections.abc import Callable

from tools.kernel_tracing.evaluator.core import Test
from tools.kernel_tracing.evaluator.functions import function_of
from tools.kernel_tracing.evaluator.operators import Operators, plain
from tools.kernel_tracing.evaluator.values import (
    UNKNOWN,
    Scope,
    Tensor,
    Value,
    choice,
)


class Expressions(Operators):
    """Evaluates expressions."""

    def evaluate(self, node: ast.expr) -> Value:
        kind = node.__class__
        if kind is ast.Name:  # half of all expressions
            return self.lookup(node.id)  # type: ignore[attr-defined]
        handler = _HANDLERS.get(kind)
        return handler(self, node) if handler is not None else UNKNOWN

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
        frame = self.stack[-1]
        line, call = frame.line, frame.call
        frame.line, frame.call = node.lineno, node
        try:
            return self.call(function, args, kwargs)
        finally:
            frame.line, frame.call = line, call

    def _tuple(self, node: ast.Tuple) -> Value:
        found = self._list(node)
        return tuple(found) if isinstance(found, list) else found

    def _list(self, node: ast.List | ast.Tuple) -> Value:
        starred = [self.evaluate(one.value) for one in node.elts if isinstance(one, ast.Starred)]
        if any(self.iterate(one) is None for one in starred):
            return UNKNOWN  # its length is not known
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
        if stop and len(open_values) > 1 and open_values[-1] is True:
            return True
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


_HANDLERS: dict[type[ast.expr], Callable[..., Value]] = {
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
