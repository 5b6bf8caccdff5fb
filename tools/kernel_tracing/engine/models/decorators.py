"""Decorators: those of libraries keep the function they decorate; those in the sources are called.

Registering decorators (`@register_attention_backend("triton")`) take effect by being called: their body fills a dict,
the registry. That happens when the module with the decorated function runs, so once such a decorator is defined, all
modules that use it are interpreted.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tools.kernel_tracing.engine.models import custom_ops
from tools.kernel_tracing.engine.values import EMPTY, Constant, External, Function, Method, Partial, Unknown, ValueSet
from tools.kernel_tracing.source.declarations import FunctionInfo
from tools.kernel_tracing.source.syntax import last_name, walk

if TYPE_CHECKING:
    from tools.kernel_tracing.engine.frame import Frame

# Decorators that the language or the index handles itself.
_SKIPPED = {"property", "cached_property", "staticmethod", "classmethod", "setter", "deleter", "abstractmethod", "jit"}


def decorate(frame: Frame, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, plain: ValueSet) -> ValueSet:
    """What a definition binds after applying its decorators."""
    from tools.kernel_tracing.engine import calls, expressions
    from tools.kernel_tracing.engine.frame import Arguments

    values = plain
    for decorator in reversed(node.decorator_list):
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        terminal = last_name(target)
        if terminal in _SKIPPED:
            continue
        if custom_ops.is_custom_op_decorator(terminal):
            custom_ops.register_decorated(frame, decorator, values)
            continue
        found = expressions.evaluate(frame, target)
        site = (frame.module.name, decorator.lineno)
        result: ValueSet = EMPTY
        for value in found:
            if not isinstance(value, (Function, Method)):
                continue
            if isinstance(decorator, ast.Call):
                result |= _apply_factory(frame, value, decorator, values, site)
            else:
                closure = value.closure if isinstance(value, Function) else None
                receiver = value.receiver if isinstance(value, Method) else None
                result |= calls.enter(
                    frame, value.info, receiver, closure, Arguments([values]), None, variant=("decorates", site)
                )
        kept = frozenset(v for v in transparent(frame, result) if not isinstance(v, (Unknown, Constant, External)))
        values = kept or values
    return values


def _apply_factory(
    frame: Frame, factory: Function | Method, decorator: ast.Call, values: ValueSet, site: tuple[str, int]
) -> ValueSet:
    """`@factory(arguments)`: call the factory, then what it returns with the decorated object."""
    from tools.kernel_tracing.engine import calls, expressions
    from tools.kernel_tracing.engine.frame import Arguments

    arguments = Arguments(
        [expressions.evaluate(frame, argument) for argument in decorator.args],
        {keyword.arg: expressions.evaluate(frame, keyword.value) for keyword in decorator.keywords if keyword.arg},
    )
    closure = factory.closure if isinstance(factory, Function) else None
    receiver = factory.receiver if isinstance(factory, Method) else None
    made = calls.enter(frame, factory.info, receiver, closure, arguments, None, variant=("decorates", site))
    result: ValueSet = EMPTY
    for inner in made:
        given = Arguments([values])
        if isinstance(inner, Partial):  # a partial of the decorator itself: `return partial(trace, level=level)`
            given, inner = Arguments([*inner.positional, values], dict(inner.keywords)), inner.function
        if isinstance(inner, Function):
            result |= calls.enter(frame, inner.info, None, inner.closure, given, None, variant=("decorates", site))
        elif isinstance(inner, Method):
            result |= calls.enter(frame, inner.info, inner.receiver, None, given, None, variant=("decorates", site))
    return result


def transparent(frame: Frame, values: ValueSet) -> ValueSet:
    """The values, without wrappers that only pass calls on to another of the values.

    A debugging decorator returns the function itself unless debugging is on; otherwise it returns a `functools.wraps`
    wrapper that passes all arguments on. Both call the same function.
    """
    kept = []
    for value in values:
        if isinstance(value, Function) and value.closure is not None and value.info.stands_for:
            wrapped = frame.solver.peek(("local", value.closure, value.info.stands_for))
            if any(isinstance(one, (Function, Method)) for one in wrapped) and wrapped <= values:
                continue
        kept.append(value)
    return values if len(kept) == len(values) else frozenset(kept)


def is_registering(function: FunctionInfo) -> bool:
    """Whether a decorator registers what it decorates.

    Such a decorator returns a function that it defines, or its argument, and its body stores into a subscript or calls
    `register*`.
    """
    if isinstance(function.node, (ast.Module, ast.Lambda)):
        return False
    body = function.node.body
    own = {node.name for node in body if isinstance(node, ast.FunctionDef)} | set(function.parameters)
    if not any(isinstance(n, ast.Return) and isinstance(n.value, ast.Name) and n.value.id in own for n in body):
        return False
    for node in walk(function.node):
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Subscript) for target in node.targets):
            return True
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            if name.startswith("register"):
                return True
    return False


def load_users(frame: Frame, function: FunctionInfo) -> None:
    """Interpret the modules that register something with this decorator."""
    index = frame.solver.index
    for user in index.users_of_decorator(function.qualname):
        module = index.module(user)
        if module is not None and function in index.lookup(module, function.qualname):
            frame.solver.start_module(module)
