"""Statements: runs them in order; a test that is not decided runs both branches and joins what they leave."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, TypeGuard

from tools.kernel_tracing.evaluator.blocks import Blocks, join_names
from tools.kernel_tracing.evaluator.core import Test
from tools.kernel_tracing.evaluator.functions import function_of
from tools.kernel_tracing.evaluator.values import (
    MISSING,
    UNKNOWN,
    Break,
    Choice,
    Continue,
    External,
    Instance,
    Lazy,
    Property,
    Raised,
    Return,
    Signal,
    Unknown,
    Value,
    choice,
)


class Statements(Blocks):
    """Runs statements."""

    def run(self, body: list[ast.stmt]) -> None:
        frame = self.stack[-1]
        for statement in body:
            frame.line = statement.lineno
            handler = _HANDLERS.get(statement.__class__)
            if handler is not None:
                handler(self, statement)

    def _expression(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.evaluate(node.value)

    def _assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _assign_annotated(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))

    def _assign_augmented(self, node: ast.AugAssign) -> None:
        load: Any = type(node.target)
        fields = {name: getattr(node.target, name) for name in node.target._fields if name != "ctx"}
        current = load(**fields, ctx=ast.Load())
        ast.copy_location(current, node.target)
        whole = ast.copy_location(ast.BinOp(current, node.op, node.value), node)
        owner = self.evaluate(current)
        if isinstance(owner, list) and isinstance(node.op, ast.Add):
            added = self.iterate(self.evaluate(node.value))
            owner.extend(added if added is not None else [])
            return
        self.assign(node.target, self.evaluate(whole))

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self.bind(target.id, value)
        elif isinstance(target, ast.Attribute):
            self.store(self.evaluate(target.value), target.attr, value)
        elif isinstance(target, ast.Subscript):
            self._assign_item(self.evaluate(target.value), self.evaluate(target.slice), value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, value)

    def _assign_item(self, owner: Value, key: Value, value: Value) -> None:
        for one in owner.values if isinstance(owner, Choice) else (owner,):
            if isinstance(one, (dict, list)):
                try:
                    if isinstance(one, dict) and self.region and key in one:
                        value = choice([one[key], value])
                    one[key] = value
                except (TypeError, IndexError, ValueError):
                    continue
            elif isinstance(one, Instance) and one.cls.find("__setitem__") is not MISSING:
                self.call(self.load(one, "__setitem__"), [key, value], {})

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        values = self.iterate(value)
        star = next((i for i, part in enumerate(targets) if isinstance(part, ast.Starred)), None)
        for position, part in enumerate(targets):
            if values is None:
                self.assign(part.value if isinstance(part, ast.Starred) else part, UNKNOWN)
            elif isinstance(part, ast.Starred):
                end = len(values) - (len(targets) - position - 1)
                self.assign(part.value, values[position:end])
            else:
                at = position if star is None or position < star else position - len(targets)
                self.assign(part, values[at] if -len(values) <= at < len(values) else UNKNOWN)

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.frame.scope.names.pop(target.id, None)
            elif isinstance(target, ast.Attribute):
                owner = self.evaluate(target.value)
                if isinstance(owner, Instance) and not self.region:
                    owner.fields.pop(target.attr, None)
            elif isinstance(target, ast.Subscript):
                owner, key = self.evaluate(target.value), self.evaluate(target.slice)
                if isinstance(owner, dict) and not self.region and not isinstance(key, Unknown):
                    owner.pop(key, None)

    def _return(self, node: ast.Return) -> None:
        raise Return(self.evaluate(node.value) if node.value is not None else None)

    def _raise(self, node: ast.Raise) -> None:
        value = self.evaluate(node.exc) if node.exc is not None else self.frame.handled
        if isinstance(value, type) and issubclass(value, BaseException):
            value = value()
        raise Raised(value)

    def _if(self, node: ast.If) -> None:
        truth = self.truth(self.evaluate(node.test))
        if truth is not None:
            self._branch(node.body if truth else node.orelse, Test(node.test, not truth, False))
        else:
            self.split(node.test, lambda: self.run(node.body), lambda: self.run(node.orelse))

    def _branch(self, body: list[ast.stmt], test: Test) -> None:
        tests = self.stack[-1].tests
        tests.append(test)
        try:
            self.run(body)
        finally:
            tests.pop()

    def split(self, test: ast.expr, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Runs both branches of a test, each as if it were taken, and joins the names that they leave."""
        frame = self.frame
        scope, before = frame.scope, frame.scope.names
        ends: list[dict[str, Value]] = []
        signals: list[Signal] = []
        returned = len(frame.returns)
        for branch, negated in ((yes, False), (no, True)):
            scope.names = dict(before)
            if not self.narrow(test, negated):
                continue
            frame.tests.append(Test(test, negated, True))
            try:
                with self.uncertain():
                    branch()
                ends.append(scope.names)
            except Signal as signal:
                if isinstance(signal, Return):
                    frame.returns.append(signal.value)
                signals.append(signal.with_traceback(None))
            finally:
                frame.tests.pop()
        scope.names = join_names(ends) if ends else before
        if ends:
            return
        raise _left(signals, frame.returns, returned)

    def narrow(self, test: ast.expr, negated: bool) -> bool:
        """Applies what an undecided test says about a local name; False if no value passes."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.narrow(test.operand, not negated)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or if negated else ast.And):
            passes = [self.narrow(operand, negated) for operand in test.values]  # every one narrows
            return all(passes)
        name, check = self._narrowing(test)
        value = self.frame.scope.names.get(name, MISSING) if name else MISSING
        if not isinstance(value, Choice) or check is None:
            return True
        kept = [one for one in value.values if check(one) is not negated]
        if kept:
            self.frame.scope.names[name] = choice(kept)
        return bool(kept)

    def _narrowing(self, test: ast.expr) -> tuple[str, Callable[[Value], bool | None] | None]:
        """The local name that a test is about, and the outcome of the test for one value (None: open)."""
        if isinstance(test, ast.Name):
            return test.id, lambda value: self.truth(value)
        if _is_type_test(test) and isinstance(test.args[0], ast.Name):
            kind = self.evaluate(test.args[1])
            return test.args[0].id, lambda value: self.is_instance(value, kind)
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name):
            right = self.evaluate(test.comparators[0])
            positive = isinstance(test.ops[0], (ast.Is, ast.Eq))
            if positive or isinstance(test.ops[0], (ast.IsNot, ast.NotEq)):

                def check(value: Value) -> bool | None:
                    equal = self.truth(self.equal(value, right))
                    return None if equal is None else equal is positive

                return test.left.id, check
        return "", None

    def _import(self, node: ast.Import) -> None:
        for item in node.names:
            name = item.name if item.asname else item.name.partition(".")[0]
            value = self.import_module(item.name)
            self.bind(item.asname or name, value if item.asname else self.import_module(name))

    def _import_from(self, node: ast.ImportFrom) -> None:
        source = absolute(self.frame.module.name, self.frame.module.file, node)
        for item in node.names:
            if item.name == "*":
                self.import_all(source)
                continue
            bound = item.asname or item.name
            known = self.module(source)
            if known is not None and self.index.registers(source):
                self.start(known)  # others find its functions by key, so nobody need ever look up the name
            self.bind(bound, Lazy(source, item.name) if known is not None else self.imported(source, item.name))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        value: Value = function_of(self, node)
        for decorator in reversed(node.decorator_list):
            value = self.decorate(decorator, value)
        self.bind(node.name, value)

    def decorate(self, decorator: ast.expr, value: Value) -> Value:
        """What a decorator makes of a function or class."""
        name = decorator.attr if isinstance(decorator, ast.Attribute) else ""
        if name in ("setter", "getter", "deleter") and isinstance(decorator, ast.Attribute):
            known = self.evaluate(decorator.value)
            if isinstance(known, Property):
                return Property(known.getter, value if name == "setter" else known.setter)
        return self.call(self.evaluate(decorator), [value], {})

    def _class(self, node: ast.ClassDef) -> None:
        value: Value = self.make_class(node)
        for decorator in reversed(node.decorator_list):
            decorated = self.decorate(decorator, value)
            value = value if isinstance(decorated, (Unknown, External)) else decorated
        self.bind(node.name, value)

    def _assert(self, node: ast.Assert) -> None:
        if not isinstance(node.test, ast.Constant):
            self.evaluate(node.test)
        self.narrow(node.test, False)

    def _global(self, node: ast.Global) -> None:
        self.frame.globals |= frozenset(node.names)

    def _nonlocal(self, node: ast.Nonlocal) -> None:
        self.frame.nonlocals |= frozenset(node.names)

    def _break(self, node: ast.Break) -> None:
        raise Break

    def _continue(self, node: ast.Continue) -> None:
        raise Continue


def _left(signals: list[Signal], returns: list[Value], returned: int) -> Signal:
    """How a test is left if no branch goes on: a branch that raises is assumed not to be taken.

    Args:
        signals: how each branch was left. The list is emptied, as its owner would be kept by what it keeps.
        returns: what the function may return; what its branches add begins at `returned`.
    """
    found = signals[0] if signals else Return(UNKNOWN)
    if any(isinstance(one, Return) for one in signals):
        found = Return(choice(returns[returned:]))
        del returns[returned:]
    elif others := [one for one in signals if not isinstance(one, Raised)]:
        found = others[0]
    signals.clear()
    return found


def _is_type_test(test: ast.expr) -> TypeGuard[ast.Call]:
    """Whether an expression is `isinstance(...)`."""
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"


def absolute(module: str, file: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if file.endswith("__init__.py") else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


_HANDLERS: dict[type[ast.stmt], Callable[..., None]] = {
    ast.Expr: Statements._expression,
    ast.Assign: Statements._assign,
    ast.AnnAssign: Statements._assign_annotated,
    ast.AugAssign: Statements._assign_augmented,
    ast.Delete: Statements._delete,
    ast.Return: Statements._return,
    ast.Raise: Statements._raise,
    ast.If: Statements._if,
    ast.For: Statements._for,
    ast.AsyncFor: Statements._for,
    ast.While: Statements._while,
    ast.With: Statements._with,
    ast.AsyncWith: Statements._with,
    ast.Try: Statements._try,
    ast.Import: Statements._import,
    ast.ImportFrom: Statements._import_from,
    ast.FunctionDef: Statements._function,
    ast.AsyncFunctionDef: Statements._function,
    ast.ClassDef: Statements._class,
    ast.Assert: Statements._assert,
    ast.Global: Statements._global,
    ast.Nonlocal: Statements._nonlocal,
    ast.Break: Statements._break,
    ast.Continue: Statements._continue,
    ast.Match: Statements._match,
}
