"""What the value of an expression may be, as far as its text tells: for the checker's search for evidence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.kernel_tracing.check_source import SourceFile, last_name

# Methods that hand out what a container holds, or the object itself.
HANDS_OUT = frozenset(("copy", "cuda", "eval", "get", "items", "pop", "setdefault", "to", "values", "__getitem__"))


def value_parts(node: ast.AST) -> Iterator[tuple[ast.AST, int, int]]:
    """What an expression's value may be or hold: names, attributes, lambdas, strings; how often called; how doubtful.

    Of `a.b.c` that is c, of `x if y else z` it is x and z, of `make(f)` it is make, called, and, with doubt, f, which
    it may hand on. Keys, comparisons and arithmetic are left out.
    """
    stack = [(node, 0, 1)]
    while stack:
        part, calls, doubt = stack.pop()
        inner: list[ast.AST] = []
        if isinstance(part, (ast.Name, ast.Attribute, ast.Lambda, ast.Constant, ast.JoinedStr)):
            yield part, calls, doubt
        elif isinstance(part, ast.Call):
            handed = [*part.args, *(keyword.value for keyword in part.keywords)]
            stack += [(argument, calls, doubt + 4) for argument in handed]
            hands_out = isinstance(part.func, ast.Attribute) and part.func.attr in HANDS_OUT
            stack.append((part.func, calls + 1, doubt + 4 * hands_out))
            if isinstance(part.func, ast.Attribute) and hands_out:
                inner = [part.func.value]
        elif isinstance(part, ast.Subscript):
            # An annotation's arguments are what matters of it: Optional[Backend], list[Layer].
            name = last_name(part.value)
            annotation = name[:1].isupper() or name in ("list", "dict", "tuple", "type")
            inner = [part.value, part.slice] if annotation else [part.value]
        elif isinstance(part, ast.IfExp):
            inner = [part.body, part.orelse]
        elif isinstance(part, ast.Dict):
            inner = list(part.values)
        elif isinstance(part, ast.BinOp):
            inner = [part.left, part.right] if isinstance(part.op, (ast.Add, ast.BitOr)) else []
        elif isinstance(part, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            inner = [part.elt]
        elif isinstance(part, ast.DictComp):
            inner = [part.value]
        elif not isinstance(part, (ast.Compare, ast.UnaryOp, ast.expr_context)):
            inner = list(ast.iter_child_nodes(part))
        stack += [(child, calls, doubt) for child in inner]


def is_value(source: SourceFile, name: str) -> bool:
    """Whether a function of that name is used without being called: stored, passed or returned."""
    called = {id(call.func) for _, call in source.calls.get(name, ())}
    return any(
        ((isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name))
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called
        for node in ast.walk(source.tree)
    )
