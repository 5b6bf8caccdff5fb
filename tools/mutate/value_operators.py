"""Mutation operators on values: mistakes that keep every shape and dtype; only a comparison can find them.

Factors are off by 2^-6, and intermediate results are rounded to float8. Rows or columns are in another order, or the
last one is not written. Masks are shifted by one, the other one of two choices is made, or a name is wrong.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from tools.mutate.operators import Operator, Place, literal
from tools.mutate.torch_operators import function_name

#: The factor of `scaled`, exact in every dtype: 1.6 %, several times the unit roundoff of bfloat16.
FACTOR = 1 + 2.0**-6

#: Methods and functions that give floating-point values; what they are called on is mostly a tensor.
FLOATING = frozenset(
    {"amax", "cumsum", "double", "exp", "float", "gather", "gelu", "index_select", "log", "masked_fill", "maximum"}
    | {"mul_", "nan_to_num", "rsqrt", "sigmoid", "silu", "softmax", "square", "sum", "tanh", "vector_norm", "where"}
)

#: Functions of two or more values of which one is chosen, or takes effect.
CHOICES = frozenset({"max", "maximum", "min", "minimum", "where"})


def has_values(node: ast.AST) -> TypeGuard[ast.expr]:
    """Whether an expression gives floating-point values; those of sizes and indices do not, as far as one can see."""
    if isinstance(node, ast.Call):
        own = node.func.value if isinstance(node.func, ast.Attribute) else None
        return function_name(node) in FLOATING and not (isinstance(own, ast.Name) and own.id == "math")
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.MatMult)):
        return False
    return not any(is_size(part) for part in (node.left, node.right))


def is_size(node: ast.AST) -> bool:
    """Whether an operand is a whole number, a shape, or an element of a list."""
    text = ast.unparse(node)
    return isinstance(literal(node), int) or isinstance(node, ast.Subscript) or ".shape" in text or "int(" in text


def scaled(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x -> x * (1 + 2^-6): a factor that is slightly wrong."""
    if has_values(node):
        yield ast.BinOp(node, ast.Mult(), ast.Constant(FACTOR))


def rounded(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x -> x in float8 (e4m3), and back: an intermediate result loses all but three bits of its mantissa."""
    if has_values(node):
        converted: ast.expr = node
        for conversion in ("float8_e4m3fn", "float32"):
            dtype = ast.Attribute(ast.Name("torch", ast.Load()), conversion, ast.Load())
            converted = ast.Call(ast.Attribute(converted, "to", ast.Load()), [dtype], [])
        yield converted


def reordered(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x -> x.roll(1, 0), x.roll(1, -1): each row, or each column, stands where the one before it belongs."""
    if has_values(node):
        for dim in (0, -1):
            arguments: list[ast.expr] = [ast.Constant(1), ast.Constant(dim)]
            yield ast.Call(ast.Attribute(node, "roll", ast.Load()), arguments, [])


def unwritten(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """A result -> the same with zeros in its last row, or in its last column."""
    result = isinstance(place.parent, ast.Return) and not isinstance(node, ast.Tuple)
    element = isinstance(place.parent, ast.Tuple) and place.field == "elts" and isinstance(place.parent.ctx, ast.Load)
    stored = (
        isinstance(place.parent, ast.Assign)
        and place.field == "value"
        and isinstance(place.parent.targets[0], ast.Subscript)
    )
    if not isinstance(node, (ast.Name, ast.Call, ast.BinOp)) or not (
        result or stored or (element and isinstance(node, ast.Name))
    ):
        return
    places: Sequence[tuple[int, Sequence[ast.expr]]] = ((0, ()), (-1, (ast.Constant(...),)))
    for dim, before in places:
        parts = [
            part(node, before, ast.Slice(None, ast.Constant(-1))),
            part(node, before, ast.Slice(ast.Constant(-1), None)),
        ]
        parts[1] = ast.BinOp(parts[1], ast.Mult(), ast.Constant(0))
        joined = ast.Attribute(ast.Name("torch", ast.Load()), "cat", ast.Load())
        yield ast.Call(joined, [ast.List(parts, ast.Load())], [ast.keyword("dim", ast.Constant(dim))])


def part(node: ast.expr, before: Sequence[ast.expr], bounds: ast.Slice) -> ast.expr:
    index: ast.expr = ast.Tuple([*before, bounds], ast.Load()) if before else bounds
    return ast.Subscript(node, index, ast.Load())


def other_choice(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """min(a, b) -> b; torch.where(c, a, b) -> a, b."""
    if isinstance(node, ast.Call) and function_name(node) in CHOICES:
        yield from node.args[1:]


def boundary(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """`a < b` -> `a < b + 1`, `a < b - 1`: a mask that reaches one too far, or not far enough."""
    if (
        isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        and literal(node.comparators[0]) is None
    ):
        for operator in (ast.Add(), ast.Sub()):
            yield ast.Compare(node.left, node.ops, [ast.BinOp(node.comparators[0], operator, ast.Constant(1))])


def rounds(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """Every second round of a loop is left out."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
        every = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        step = ast.Slice(None, None, ast.Constant(2))
        yield ast.For(node.target, ast.Subscript(every, step, ast.Load()), node.body, node.orelse)


def earlier_name(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """A local name is taken for the one that was assigned before it, of those that stand on the lines above."""
    if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and place.function is not None):
        return
    stored: dict[str, None] = {}
    for one in ast.walk(place.function):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store) and one.lineno < node.lineno:
            stored[one.id] = None
    names = list(stored)
    if node.id in stored and len(names) > 1:
        yield ast.Name(names[names.index(node.id) - 1], node.ctx)


VALUES: dict[str, Operator] = {
    "scaled": scaled,
    "rounded": rounded,
    "reordered": reordered,
    "unwritten": unwritten,
    "other_choice": other_choice,
    "boundary": boundary,
    "rounds": rounds,
    "earlier_name": earlier_name,
}
