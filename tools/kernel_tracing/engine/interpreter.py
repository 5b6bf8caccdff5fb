"""Statements: walks a body in order and tracks what each local name may hold."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from tools.kernel_tracing.engine import attributes, calls, decisions, expressions
from tools.kernel_tracing.engine.frame import Environment, Frame, union
from tools.kernel_tracing.engine.models import containers, decorators
from tools.kernel_tracing.engine.solver import Context, Guard, Solver
from tools.kernel_tracing.engine.values import EMPTY, Alias, ClassValue, Container, Function, Instance, ValueSet
from tools.kernel_tracing.source.declarations import ClassInfo, FunctionInfo


def interpret(solver: Solver, context: Context) -> None:
    """Interpret a context once: read its parameters, walk its body, write its results."""
    frame = Frame(solver, context)
    node = context.function.node
    calls.bind_locals(frame)
    if isinstance(node, ast.Lambda):
        frame.write(("return", context), expressions.evaluate(frame, node.body))
        return
    if context.function.is_generator:
        generator = frame.universe.make(Container, ("yield", context), "generator")
        frame.write(("return", context), frozenset((generator,)))
    block(frame, node.body)


def block(frame: Frame, body: Sequence[ast.stmt]) -> bool:
    """Walk statements; returns True if control cannot reach the end."""
    guards = frame.guards
    leaves = _statements(frame, body)
    frame.guards = guards
    return leaves


def _statements(frame: Frame, body: Sequence[ast.stmt]) -> bool:
    """Like `block`, for a block that always runs: what its early returns imply also holds after it."""
    for statement in body:
        handler = _HANDLERS.get(type(statement))
        if handler is not None and handler(frame, statement):
            return True
    return False


def join(*environments: Environment) -> Environment:
    """What names may hold where branches meet."""
    joined = dict(environments[0])
    for environment in environments[1:]:
        for name, values in environment.items():
            known = joined.get(name)
            joined[name] = values if known is None or known is values else known | values
    return joined


def _expression(frame: Frame, node: ast.Expr) -> None:
    if not isinstance(node.value, ast.Constant):
        expressions.evaluate(frame, node.value)


def _assign(frame: Frame, node: ast.Assign) -> None:
    values = expressions.evaluate(frame, node.value)
    for target in node.targets:
        store(frame, target, values)


def _assign_annotated(frame: Frame, node: ast.AnnAssign) -> None:
    values = expressions.evaluate(frame, node.value) if node.value is not None else EMPTY
    if isinstance(node.target, ast.Attribute):
        attributes.declare(frame, node.target, node.annotation)
    if node.value is not None:
        if values and all(value is frame.universe.unknown for value in values):
            values = attributes.annotated(frame, node.annotation, frame.module) or values
        store(frame, node.target, values)


def _assign_augmented(frame: Frame, node: ast.AugAssign) -> None:
    added = expressions.evaluate(frame, node.value)
    if isinstance(node.target, ast.Name):
        old = frame.lookup(node.target.id)
        containers.extend(frame, old, added)
        frame.assign(node.target.id, frozenset(v for v in old | added if not attributes.is_literal(v)) or added)
    elif isinstance(node.target, ast.Attribute):
        containers.extend(frame, expressions.evaluate(frame, node.target), added)


def store(frame: Frame, target: ast.expr, values: ValueSet) -> None:
    """Assign values to a target: a name, an attribute, an item, or a pattern of these."""
    if isinstance(target, ast.Name):
        frame.assign(target.id, values)
    elif isinstance(target, ast.Attribute):
        attributes.store(frame, expressions.evaluate(frame, target.value), target.attr, values)
    elif isinstance(target, ast.Subscript):
        key = expressions.literal_key(frame, target.slice)
        for owner in expressions.evaluate(frame, target.value):
            if isinstance(owner, Container):
                frame.put(owner, key, values)
            elif isinstance(owner, Instance):
                calls.call_method(frame, owner, "__setitem__", [frame.universe.data, values], target)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for position, part in enumerate(target.elts):
            if isinstance(part, ast.Starred):
                store(frame, part.value, values)
            else:
                store(frame, part, expressions.item(frame, values, position))


def _delete(frame: Frame, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            frame.environment.pop(target.id, None)


def _return(frame: Frame, node: ast.Return) -> bool:
    values = expressions.evaluate(frame, node.value) if node.value is not None else frame.constant(None)
    if not frame.function.is_generator:
        frame.write(("return", frame.context), values)
    return True


def _raise(frame: Frame, node: ast.Raise) -> bool:
    if node.exc is not None:
        expressions.evaluate(frame, node.exc)
    return True


def _leave_loop(frame: Frame, node: ast.stmt) -> bool:
    frame.loop_exits.append(dict(frame.environment))
    return True


def _if(frame: Frame, node: ast.If) -> bool:
    truth = decisions.truth(frame, node.test)
    if truth == "waits":
        return False
    if truth == "true":
        return _statements(frame, node.body)
    if truth == "false":
        return _statements(frame, node.orelse)
    expressions.evaluate(frame, node.test)
    before, guards = frame.environment, frame.guards
    branches: list[tuple[Environment, tuple[Guard, ...]]] = []
    left = ""
    for body, negated in ((node.body, False), (node.orelse, True)):
        frame.environment = dict(before)
        if decisions.narrow(frame, node.test, negated):
            frame.guards = (*guards, Guard(node.test, negated))
            if _statements(frame, body):
                left = "raise" if isinstance(body[-1], ast.Raise) else "return"
            else:
                branches.append((frame.environment, frame.guards[len(guards) :]))
        frame.guards = guards
    if left and len(branches) == 1:  # what follows runs only if the test selects the other branch
        taken, *inner = branches[0][1]
        frame.guards = (*guards, Guard(taken.test, taken.negated, left), *inner)
    frame.environment = join(*(environment for environment, _ in branches)) if branches else before
    return not branches


def _loop(frame: Frame, node: ast.For | ast.AsyncFor | ast.While) -> None:
    before = dict(frame.environment)
    outer, frame.loop_exits = frame.loop_exits, []
    if isinstance(node, ast.For) and (literals := _literals(node.iter)):
        # Unroll: `for name in ("a", "b"): setattr(self, name, ...)` must not mix up the names.
        for literal in literals:
            store(frame, node.target, frame.constant(literal))
            block(frame, node.body)
            frame.environment = join(before, frame.environment, *frame.loop_exits)
        frame.loop_exits = outer
        return
    # Walk the body twice: the second pass sees what the first one assigned.
    for _ in range(2):
        if isinstance(node, ast.While):
            if decisions.truth(frame, node.test) == "false":
                break
            expressions.evaluate(frame, node.test)
        else:
            store(frame, node.target, expressions.iterate(frame, node.iter))
        block(frame, node.body)
        frame.environment = join(before, frame.environment, *frame.loop_exits)
    frame.loop_exits = outer
    block(frame, node.orelse)


def _literals(node: ast.expr) -> list[str]:
    """The strings of a literal list or tuple of strings."""
    if not isinstance(node, (ast.List, ast.Tuple)):
        return []
    found = [part.value for part in node.elts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return found if len(found) == len(node.elts) else []


def _with(frame: Frame, node: ast.With | ast.AsyncWith) -> bool:
    for item in node.items:
        managers = expressions.evaluate(frame, item.context_expr)
        entered: list[ValueSet] = []
        for manager in managers:
            if isinstance(manager, Instance):
                entered.append(calls.call_method(frame, manager, "__enter__", [], item.context_expr))
                calls.call_method(frame, manager, "__exit__", [frame.universe.data] * 3, item.context_expr)
            elif isinstance(manager, Container):  # a generator decorated with contextmanager
                entered.append(frame.items(manager))
            else:
                entered.append(frozenset((manager,)))
        if item.optional_vars is not None:
            store(frame, item.optional_vars, union(entered))
    return _statements(frame, node.body)


def _try(frame: Frame, node: ast.Try) -> bool:
    before = dict(frame.environment)
    leaves = block(frame, node.body)
    ends = [] if leaves or block(frame, node.orelse) else [frame.environment]
    body_end = frame.environment
    for handler in node.handlers:
        frame.environment = join(before, body_end)
        if handler.name:
            frame.environment[handler.name] = frame.universe.data
        if not block(frame, handler.body):
            ends.append(frame.environment)
    frame.environment = join(*ends) if ends else body_end
    return block(frame, node.finalbody) or not ends


def _match(frame: Frame, node: ast.Match) -> None:
    subject = expressions.evaluate(frame, node.subject)
    before, ends = frame.environment, [frame.environment]
    for case in node.cases:
        frame.environment = dict(before)
        for part in ast.walk(case.pattern):
            name = getattr(part, "name", None)
            if isinstance(name, str):
                frame.environment[name] = subject
        if not block(frame, case.body):
            ends.append(frame.environment)
    frame.environment = join(*ends)


def _import(frame: Frame, node: ast.Import) -> None:
    for item in node.names:
        name = item.name if item.asname else item.name.partition(".")[0]
        frame.assign(item.asname or name, expressions.module_value(frame, name))


def _import_from(frame: Frame, node: ast.ImportFrom) -> None:
    source = frame.module.absolute(node)
    traced = source in frame.solver.index.sources.modules
    for item in node.names:
        if item.name == "*":
            continue
        bound = item.asname or item.name
        if traced:
            frame.assign(bound, frame.universe.one(Alias, source, item.name))
        else:  # from a namespace package, which has no file, or from something that is not traced
            frame.assign(bound, expressions.module_value(frame, f"{source}.{item.name}"))


def _function(frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    info = frame.module.function(node, frame.function.qualname)
    if "overload" in info.decorators:
        return
    closure = None if frame.is_module else frame.context
    frame.assign(node.name, decorators.decorate(frame, node, frame.universe.one(Function, info, closure)))
    if frame.is_module and decorators.is_registering(info):
        decorators.load_users(frame, info)


def _class(frame: Frame, node: ast.ClassDef) -> None:
    info = frame.module.inner_class(node, frame.function.qualname)
    _class_body(frame, info, node.body)
    frame.assign(node.name, decorators.decorate(frame, node, frame.universe.one(ClassValue, info)))


def _class_body(frame: Frame, info: ClassInfo, body: Sequence[ast.stmt]) -> None:
    """Store class attributes; methods are in the index, except those that a traced decorator replaces."""
    environment, is_module = dict(frame.environment), frame.is_module
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function: FunctionInfo = frame.module.function(statement, info.qualname)
            plain = frame.universe.one(Function, function, None)
            frame.environment[statement.name] = plain
            decorated = decorators.decorate(frame, statement, plain)
            if decorated != plain:
                frame.write(("class", info, statement.name), decorated)
        elif isinstance(statement, ast.ClassDef):
            inner = frame.module.inner_class(statement, info.qualname)
            _class_body(frame, inner, statement.body)
            frame.write(("class", info, statement.name), frame.universe.one(ClassValue, inner))
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            frame.is_module = False
            values = expressions.evaluate(frame, statement.value)
            frame.is_module = is_module
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    frame.environment[target.id] = values
                    frame.write(("class", info, target.id), values)
        elif isinstance(statement, ast.If):
            truth = decisions.truth(frame, statement.test)
            _class_body(frame, info, statement.body if truth != "false" else [])
            _class_body(frame, info, statement.orelse if truth != "true" else [])
    frame.environment = environment


def _assert(frame: Frame, node: ast.Assert) -> None:
    expressions.evaluate(frame, node.test)
    if decisions.truth(frame, node.test) != "false":
        decisions.narrow(frame, node.test, False)


def _global(frame: Frame, node: ast.Global) -> None:
    frame.global_names.update(node.names)


_HANDLERS: dict[type[ast.stmt], Callable[..., bool | None]] = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _assign_annotated,
    ast.AugAssign: _assign_augmented,
    ast.Delete: _delete,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Break: _leave_loop,
    ast.Continue: _leave_loop,
    ast.If: _if,
    ast.For: _loop,
    ast.AsyncFor: _loop,
    ast.While: _loop,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.Match: _match,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
    ast.Assert: _assert,
    ast.Global: _global,
}
