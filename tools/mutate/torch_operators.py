"""Mutation operators on calls: what a tensor program gets wrong that arithmetic alone does not show."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.mutate.operators import Operator, Place

#: Names of methods, functions and modules' attributes that are easily taken for each other.
RELATED = {
    "amax": ("amin", "mean"),
    "argsort": ("argmax",),
    "sum": ("mean", "amax"),
    "max": ("min",),
    "min": ("max",),
    "maximum": ("minimum",),
    "minimum": ("maximum",),
    "exp": ("exp2", "expm1"),
    "log": ("log2", "log1p"),
    "log2": ("log10", "sqrt"),
    "rsqrt": ("sqrt", "reciprocal"),
    "square": ("abs", "sqrt"),
    "cumsum": ("cumprod",),
    "sigmoid": ("tanh", "exp"),
    "silu": ("relu", "gelu", "sigmoid"),
    "softmax": ("log_softmax", "sigmoid"),
    "mul_": ("add_", "div_"),
    "index_add_": ("index_copy_",),
    "zeros_like": ("ones_like",),
    "ones_like": ("zeros_like",),
    "clamp_min": ("clamp_max",),
    "rand": ("randn",),
    "all": ("any",),
    "any": ("all",),
    "e": ("pi",),
    "inf": ("nan",),
    "repeat_interleave": ("repeat",),
    "vector_norm": ("norm",),
    "topk": ("sort",),
}

#: A dtype and what could be written instead: less precise ones, and for integers the other width.
DTYPES = {
    "float64": ("float32",),
    "float32": ("bfloat16", "float16"),
    "bfloat16": ("float16",),
    "int32": ("int64",),
    "int64": ("int32",),
}
CONVERSIONS = {"double": ("float",), "float": ("bfloat16", "half"), "long": ("float",)}

#: Methods and functions that reduce or scan a dimension: a reference could do so over a part of it.
OVER_A_DIMENSION = ("amax", "sum", "cumsum", "softmax", "vector_norm", "argsort", "sort", "topk", "mean")

#: Keywords that do not change values on a CPU.
PLACEMENT = ("device",)


def function_name(node: ast.Call) -> str:
    """The last part of what is called: ``amax`` of ``x.amax(...)`` and of ``torch.amax(...)``."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def receiver(node: ast.Call) -> ast.expr | None:
    """The tensor that a method is called on; None for a function of a module."""
    if not isinstance(node.func, ast.Attribute):
        return None
    root: ast.expr = node.func.value
    while isinstance(root, ast.Attribute):
        root = root.value
    if isinstance(root, ast.Name) and root.id in ("torch", "math"):
        return None
    return node.func.value


def related(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """amax -> amin, sum -> mean, exp -> exp2, log -> log2, silu -> relu and so on."""
    if isinstance(node, ast.Attribute):
        for other in RELATED.get(node.attr, ()):
            yield ast.Attribute(node.value, other, node.ctx)
    elif isinstance(node, ast.Name) and isinstance(place.parent, ast.Call) and place.field == "func":
        for other in RELATED.get(node.id, ()):
            yield ast.Name(other, node.ctx)


def precision(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """torch.float32 -> torch.bfloat16, .double() -> .float()."""
    if not isinstance(node, ast.Attribute):
        return
    names = CONVERSIONS if isinstance(place.parent, ast.Call) and place.field == "func" else DTYPES
    for other in names.get(node.attr, ()):
        yield ast.Attribute(node.value, other, node.ctx)


def dropped_call(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x.float() -> x, torch.exp(x) -> x: a step is forgotten."""
    if not isinstance(node, ast.Call):
        return
    own = receiver(node)
    if own is not None:
        yield own
    elif node.args:
        yield node.args[0]


def dropped_argument(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """f(a, key=b) -> f(a), f(a, b) -> f(a): a default is taken, but never that of the device."""
    if not isinstance(node, ast.Call):
        return
    for position, keyword in enumerate(node.keywords):
        if keyword.arg not in PLACEMENT:
            yield ast.Call(node.func, node.args, node.keywords[:position] + node.keywords[position + 1 :])
    if len(node.args) > 1 or (node.args and receiver(node) is not None):
        yield ast.Call(node.func, node.args[:-1], node.keywords)


def exchanged_arguments(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """f(a, b) -> f(b, a), each neighboring pair; a.f(b) -> b.f(a) for tensors' own operations."""
    if not isinstance(node, ast.Call):
        return
    for first in range(len(node.args) - 1):
        arguments = list(node.args)
        arguments[first], arguments[first + 1] = arguments[first + 1], arguments[first]
        yield ast.Call(node.func, arguments, node.keywords)


def part_of_a_dimension(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x.sum(dim) -> x[..., :N].sum(dim): right at the small twin's sizes, wrong at the real ones; and all but one."""
    if not isinstance(node, ast.Call) or function_name(node) not in OVER_A_DIMENSION:
        return
    own = receiver(node)
    if own is None and not node.args:
        return
    value = own if own is not None else node.args[0]
    for stop in (place.size, -1):
        if stop == 0:
            continue
        part = ast.Subscript(
            value, ast.Tuple([ast.Constant(...), ast.Slice(None, ast.Constant(stop))], ast.Load()), ast.Load()
        )
        if own is not None and isinstance(node.func, ast.Attribute):
            yield ast.Call(ast.Attribute(part, node.func.attr, ast.Load()), node.args, node.keywords)
        else:
            yield ast.Call(node.func, [part, *node.args[1:]], node.keywords)


def transposed(node: ast.AST, place: Place) -> Iterator[ast.AST]:
    """x.T -> x."""
    if isinstance(node, ast.Attribute) and node.attr in ("T", "values"):
        yield node.value


CALLS: dict[str, Operator] = {
    "related": related,
    "precision": precision,
    "dropped_call": dropped_call,
    "dropped_argument": dropped_argument,
    "exchanged_arguments": exchanged_arguments,
    "part_of_a_dimension": part_of_a_dimension,
    "transposed": transposed,
}
