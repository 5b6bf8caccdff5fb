"""Loops, context managers and exception handlers."""

from __future__ import annotations

import ast
from collections.abc import Callable

from tools.kernel_tracing.evaluator.core import Core
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Break,
    Continue,
    Instance,
    Raised,
    Return,
    Signal,
    Value,
    choice,
)

MAX_ROUNDS = 4096


def join_names(ends: list[dict[str, Value]]) -> dict[str, Value]:
    """What names hold where branches meet."""
    joined = dict(ends[0])
    for names in ends[1:]:
        for name, value in names.items():
            known = joined.get(name, MISSING)
            joined[name] = value if known is MISSING or known is value else choice([known, value])
    return joined


class Blocks(Core):
    """Loops, context managers and exception handlers."""

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        values = self.iterate(self.evaluate(node.iter))
        if values is None:
            self._once(lambda: self.assign(node.target, UNKNOWN), node.body)
            return
        for value in values[:MAX_ROUNDS]:
            self.assign(node.target, value)
            try:
                self.run(node.body)
            except Break:
                return
            except Continue:
                continue
        self.run(node.orelse)

    def _while(self, node: ast.While) -> None:
        for _ in range(MAX_ROUNDS):
            truth = self.truth(self.evaluate(node.test))
            if truth is None:
                self._once(lambda: None, node.body)
                return
            if not truth:
                self.run(node.orelse)
                return
            try:
                self.run(node.body)
            except Break:
                return
            except Continue:
                continue

    def _once(self, prepare: Callable[[], None], body: list[ast.stmt]) -> None:
        """A loop that may run any number of times."""
        scope = self.frame.scope
        before = dict(scope.names)
        try:
            with self.uncertain():
                prepare()
                self.run(body)
        except Return as signal:
            self.frame.returns.append(signal.value)
        except Signal:
            pass
        scope.names = join_names([before, scope.names])

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        self._managers(list(node.items), node.body)

    def _managers(self, items: list[ast.withitem], body: list[ast.stmt]) -> None:
        if not items:
            self.run(body)
            return
        first, *rest = items
        manager = self.evaluate(first.context_expr)

        def inside(value: Value) -> None:
            if first.optional_vars is not None:
                self.assign(first.optional_vars, value)
            self._managers(rest, body)

        self.with_manager(manager, inside)

    def _try(self, node: ast.Try) -> None:
        frame = self.frame
        catches = bool(node.handlers)
        frame.handlers += catches
        depth, tests = len(self.stack), len(frame.tests)
        try:
            try:
                self.run(node.body)
            finally:
                frame.handlers -= catches
            self.run(node.orelse)
        except Raised as raised:
            del self.stack[depth:], frame.tests[tests:]
            handler = next((one for one in node.handlers if self._catches(one, raised.value)), None)
            if handler is None:
                self.run(node.finalbody)
                raise
            frame.handled = raised.value
            if handler.name:
                self.bind(handler.name, raised.value)
            self.run(handler.body)
        except Signal:
            self.run(node.finalbody)
            raise
        self.run(node.finalbody)

    def _catches(self, handler: ast.ExceptHandler, value: Value) -> bool:
        if handler.type is None or not isinstance(value, (BaseException, Instance)):
            return True
        kinds = self.evaluate(handler.type)
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if isinstance(kind, type) and isinstance(value, BaseException):
                if isinstance(value, kind):
                    return True
            elif self.is_instance(value, kind) is not False or kind in (Exception, BaseException):
                return True
        return False

    def _match(self, node: ast.Match) -> None:
        subject = self.evaluate(node.subject)
        for case in node.cases:
            pattern = case.pattern
            if isinstance(pattern, ast.MatchValue):
                decided = self.truth(self.equal(subject, self.evaluate(pattern.value)))
                if decided:
                    self.run(case.body)
                    return
            elif isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
                self.run(case.body)
                return
