"""Mutation operators on statements: deleted ones, decided conditions, loops that end early or start late."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.mutate.operators import Operator, Place


def deleted(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """A statement is forgotten. Asserts count; a name's first assignment does not: that only raises NameError."""
    if isinstance(node, (ast.Assert, ast.AugAssign, ast.Expr, ast.If, ast.Continue, ast.Break)):
        yield ast.Pass()
    elif isinstance(node, ast.Assign) and place.function is not None:
        known = assigned_before(place.function, node.lineno)
        if all(name in known for target in node.targets for name in stored_names(target)):
            yield ast.Pass()


def assigned_before(function: ast.FunctionDef, line: int) -> set[str]:
    """Arguments of a function, and names that a statement above `line` assigns."""
    names = {argument.arg for argument in function.args.args}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < line:
            names.add(node.id)
    return names


def stored_names(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def condition(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """if c -> if not c, if True; the condition of an assert is not negated: that refuses every input."""
    if isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        yield ast.If(ast.Constant(True), node.body, node.orelse)


def loop(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """The last or the first round of a loop over a range is left out; `continue` ends the loop."""
    if isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
        rounds = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        for part in (ast.Slice(None, ast.Constant(-1)), ast.Slice(ast.Constant(1), None)):
            yield ast.For(node.target, ast.Subscript(rounds, part, ast.Load()), node.body, node.orelse)


def exchanged_statements(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """a = b, c -> the same value for both targets: one of two results is taken twice."""
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        for element in node.value.elts:
            yield ast.Return(ast.Tuple([element] * len(node.value.elts), ast.Load()))


STATEMENTS: dict[str, Operator] = {
    "deleted": deleted,
    "condition": condition,
    "loop": loop,
    "one_result_twice": exchanged_statements,
}
