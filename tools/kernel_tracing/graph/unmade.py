"""Classes that nothing makes: an annotation admits them, but every place that could construct one is dead.

Where only an annotation is known, the solver assumes every class that it admits. Such a class is removed if it is
mentioned only in calls (`Backend(runner)`), all in functions that were interpreted, and if none of these calls was
reached because tests that the platform or the model's configuration decides exclude them. The same applies to a base
class that is never called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.kernel_tracing.engine.solver import Context, Solver
from tools.kernel_tracing.engine.values import Instance
from tools.kernel_tracing.rules import boundaries
from tools.kernel_tracing.source.declarations import ClassInfo
from tools.kernel_tracing.source.libraries import LIBRARIES
from tools.kernel_tracing.source.syntax import last_name, walk


def remove(solver: Solver) -> list[ClassInfo]:
    """Remove the calls on such classes from the solved call graph; returns the classes, sorted by name."""
    classes = unmade(solver)
    if classes:
        solver.edges = {
            key: edge
            for key, edge in solver.edges.items()
            if not (_is_on(edge.caller, classes) or _is_on(edge.callee, classes))
        }
        solver.kernel_calls = {
            key: call for key, call in solver.kernel_calls.items() if not _is_on(call.caller, classes)
        }
    return sorted(classes, key=lambda info: (info.name, info.module.name))


def _is_on(context: Context, classes: set[ClassInfo]) -> bool:
    """Whether a context, or one that it is nested in, has an instance of such a class as its receiver."""
    scope: Context | None = context
    while scope is not None:
        if isinstance(scope.receiver, Instance) and scope.receiver.info in classes:
            return True
        scope = scope.closure
    return False


def unmade(solver: Solver) -> set[ClassInfo]:
    """Classes that only annotations admitted and that nothing makes."""
    candidates = [
        info
        for info in solver.expanded
        if info not in solver.constructed and not boundaries.is_library(info.module.name) and not _makes_itself(info)
    ]
    names = {info.name for info in candidates}
    reached = {context.function.node for context in solver.contexts.values()}
    alive: set[str] = set()
    called: set[str] = set()
    for module_name in solver.index.sources.modules:
        if module_name.partition(".")[0] in LIBRARIES or boundaries.is_test(module_name):
            continue
        text = solver.index.sources.text(module_name)
        mentioned = {name for name in names - alive if name in text}
        module = solver.index.module(module_name) if mentioned else None
        if module is None:
            continue
        for name, function, is_call in _mentions(module.tree, mentioned, module.body.node):
            called.add(name)
            if not is_call or function not in reached:
                alive.add(name)
    return {
        info
        for info in candidates
        if info.name not in alive and (info.name in called or len(solver.index.subclasses(info)) > 1)
    }


def _makes_itself(info: ClassInfo) -> bool:
    """Whether a class has a class method that calls `cls(...)`, or a method that calls `type(self)(...)`."""
    return any(
        isinstance(node, ast.Call)
        and (isinstance(node.func, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id == "cls"))
        for method in info.methods.values()
        for node in walk(method.node)
    )


def _mentions(tree: ast.AST, names: set[str], function: ast.AST) -> Iterator[tuple[str, ast.AST, bool]]:
    """Uses of names as values: the name, the enclosing function, and whether the name is called there."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _mentions(child, names, child)
        elif isinstance(child, ast.ClassDef):
            for statement in [*child.decorator_list, *child.body]:
                yield from _mentions(ast.Expression(statement), names, function)  # type: ignore[arg-type]
        elif isinstance(child, ast.Call):
            name = last_name(child.func)
            if name in names:
                yield name, function, True
            elif name not in ("isinstance", "issubclass"):
                yield from _mentions(ast.Expression(child.func), names, function)
            given = child.args[:1] if name in ("isinstance", "issubclass") else child.args
            for part in [*given, *child.keywords]:
                yield from _mentions(ast.Expression(part), names, function)  # type: ignore[arg-type]
        elif isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _mentions(ast.Expression(child.value), names, function)
        elif isinstance(child, ast.arguments):
            for default in [*child.defaults, *(part for part in child.kw_defaults if part is not None)]:
                yield from _mentions(ast.Expression(default), names, function)
        elif isinstance(child, (ast.Name, ast.Attribute)) and last_name(child) in names:
            yield last_name(child), function, False
        elif not (isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) and child is tree.returns):
            yield from _mentions(child, names, function)
