"""Mutation operators on expressions: each gives the ways in which one node of a reference could be wrong.

An operator is a function of a node and its place. It yields replacements and never changes the node. Operators on
calls and tensors are in `torch_operators`, operators on statements in `statements`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The facts about a node's place that an operator can use.

    Attributes:
        parent: the node that holds it.
        field: the attribute of `parent` that holds it.
        function: the function around it, None at module level.
        size: a size between those of the small twin and of the real Definition; 0 if there is none.
    """

    parent: ast.AST
    field: str
    function: ast.FunctionDef | None
    size: int = 0


Operator = Callable[[ast.AST, Place], Iterator[ast.AST]]

ARITHMETIC: dict[type[ast.operator], Sequence[type[ast.operator]]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div, ast.Add),
    ast.Div: (ast.Mult, ast.Sub),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr, ast.BitXor),
    ast.BitOr: (ast.BitAnd, ast.BitXor),
}

#: The boundary first, then the opposite.
COMPARISONS: dict[type[ast.cmpop], Sequence[type[ast.cmpop]]] = {
    ast.Lt: (ast.LtE, ast.GtE, ast.Eq),
    ast.LtE: (ast.Lt, ast.Gt, ast.Eq),
    ast.Gt: (ast.GtE, ast.LtE, ast.Eq),
    ast.GtE: (ast.Gt, ast.Lt, ast.Eq),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}


def arithmetic(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """a + b -> a - b, a * b -> a / b, a & b -> a | b and so on."""
    if isinstance(node, ast.BinOp):
        for other in ARITHMETIC.get(type(node.op), ()):
            yield ast.BinOp(node.left, other(), node.right)


def operand(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """a + b -> a and b; a - b -> b - a: a term or a factor is forgotten, or stands on the wrong side."""
    if isinstance(node, ast.BinOp):
        yield node.left
        yield node.right
        if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Pow, ast.MatMult)):
            yield ast.BinOp(node.right, node.op, node.left)


def sign(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """-a, ~a and `not a` -> a."""
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def comparison(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """`a < b` -> `a <= b`, `a >= b`, `a == b`; `a == b` -> `a != b`; `is` -> `is not`."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [other()], node.comparators)


def number(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """n -> n + 1, n - 1, 2 n, 0; x -> 2 x, x / 2, 0, 1.01 x. A negative number is one number."""
    if isinstance(place.parent, ast.UnaryOp):
        return
    value = literal(node)
    if value is None:
        return
    if isinstance(value, int):
        wrong: list[float] = [value + 1, value - 1, 2 * value, 0]
    else:
        wrong = [2 * value, value / 2, 0.0, 1.01 * value, value + 1.0]
    for other in dict.fromkeys(wrong):
        if other != value:
            yield ast.Constant(other)


def literal(node: ast.AST) -> int | float | None:
    """The value of a number that is written out, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    return None


def truth(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """True <-> False."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)


def index(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x[i] -> x[i + 1], x[i - 1] for an index that is an expression; written numbers are `number`'s."""
    if not isinstance(node, ast.Subscript) or isinstance(node.slice, (ast.Slice, ast.Tuple)):
        return
    if literal(node.slice) is None and isinstance(node.ctx, ast.Load):
        for operator in (ast.Add(), ast.Sub()):
            yield ast.Subscript(node.value, ast.BinOp(node.slice, operator, ast.Constant(1)), node.ctx)


def slice_bounds(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x[a:b] -> x[a + 1:b], x[a - 1:b], x[a:b + 1], x[a:b - 1], x[:b], x[a:]; a step is forgotten."""
    if not isinstance(node, ast.Slice):
        return
    lower, upper, step = node.lower, node.upper, node.step
    for operator in (ast.Add(), ast.Sub()):
        if lower is not None and literal(lower) is None:
            yield ast.Slice(ast.BinOp(lower, operator, ast.Constant(1)), upper, step)
        if upper is not None and literal(upper) is None:
            yield ast.Slice(lower, ast.BinOp(upper, operator, ast.Constant(1)), step)
    if lower is not None:
        yield ast.Slice(None, upper, step)
    if upper is not None:
        yield ast.Slice(lower, None, step)
    if step is not None:
        yield ast.Slice(lower, upper, None)


def exchanged_names(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """An argument of a function is taken for the next one of the same declared type, the last one for the first."""
    if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and place.function is not None):
        return
    types = {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in place.function.args.args}
    if node.id in types:
        alike = [name for name, annotation in types.items() if annotation == types[node.id]]
        if len(alike) > 1:
            yield ast.Name(alike[(alike.index(node.id) + 1) % len(alike)], node.ctx)


def exchanged_elements(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """(a, b) -> (b, a), of targets, results, lists of tensors and shapes; each neighboring pair."""
    if isinstance(node, (ast.Tuple, ast.List)):
        for first in range(len(node.elts) - 1):
            elements = list(node.elts)
            elements[first], elements[first + 1] = elements[first + 1], elements[first]
            yield type(node)(elements, node.ctx)


def conditional(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """a if c else b -> a, b."""
    if isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse


EXPRESSIONS: dict[str, Operator] = {
    "arithmetic": arithmetic,
    "operand": operand,
    "sign": sign,
    "comparison": comparison,
    "number": number,
    "truth": truth,
    "index": index,
    "slice": slice_bounds,
    "exchanged_names": exchanged_names,
    "exchanged_elements": exchanged_elements,
    "conditional": conditional,
}
