"""Shapes of functions, as far as a function's own syntax tree shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.kernel_tracing.source.syntax import dotted_name, is_none_test, walk, walk_scopes

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def optional_functions(node: ast.AST) -> frozenset[str]:
    """Parameters by which a decorator distinguishes `@trace` from `@trace(level=1)`: it tests them for None.

    Only for functions that return a function that they define, and only parameters that are never assigned.
    """
    if not isinstance(node, FunctionNode):
        return frozenset()
    made = {inner.name for inner in node.body if isinstance(inner, FunctionNode)}
    names = {name for name, default in _defaults(node.args) if isinstance(default, ast.Constant) and not default.value}
    if not names or not made:
        return frozenset()
    tested, returns = set[str](), False
    for part, nested in walk_scopes(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            names.discard(part.id)
        elif nested:
            continue
        elif isinstance(part, ast.Compare) and isinstance(part.left, ast.Name) and is_none_test(part):
            tested.add(part.left.id)
        elif isinstance(part, ast.Return) and part.value is not None:
            returns = returns or any(isinstance(name, ast.Name) and name.id in made for name in ast.walk(part.value))
    return frozenset(names & tested) if returns else frozenset()


def _defaults(spec: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [*spec.posonlyargs, *spec.args]
    for argument, default in zip(reversed(positional), reversed(spec.defaults), strict=False):
        yield argument.arg, default
    for argument, keyword_default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if keyword_default is not None:
            yield argument.arg, keyword_default


def passes_to(node: ast.AST) -> str:
    """For `def wrapper(*args, **kwargs)`, the name that it calls with exactly these; "" unless there is exactly one."""
    if not isinstance(node, FunctionNode):
        return ""
    spec = node.args
    if spec.posonlyargs or spec.args or spec.kwonlyargs or spec.vararg is None or spec.kwarg is None:
        return ""
    called = {
        part.func.id
        for part in walk(node)
        if isinstance(part, ast.Call)
        and isinstance(part.func, ast.Name)
        and [_starred(argument) for argument in part.args] == [spec.vararg.arg]
        and [dotted_name(word.value) for word in part.keywords if word.arg is None] == [spec.kwarg.arg]
        and len(part.keywords) == 1
    }
    return called.pop() if len(called) == 1 else ""


def _starred(node: ast.expr) -> str:
    return dotted_name(node.value) if isinstance(node, ast.Starred) else ""


def stands_for(node: ast.AST) -> str:
    """The name `function` if a wrapper has `@functools.wraps(function)` and calls `function(*args, **kwargs)`."""
    name = passes_to(node)
    for decorator in getattr(node, "decorator_list", []) if name else ():
        wraps = isinstance(decorator, ast.Call) and dotted_name(decorator.func).rpartition(".")[2] == "wraps"
        if wraps and [dotted_name(argument) for argument in decorator.args] == [name]:
            return name
    return ""
