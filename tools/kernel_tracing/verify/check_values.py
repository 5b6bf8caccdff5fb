"""What the value of an expression may be, judging from its text; for the checker's search for evidence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.kernel_tracing.verify.check_source import SourceFile, last_name

# Methods that return what a container holds, or the object itself.
HANDS_OUT = frozenset(("copy", "cuda", "eval", "get", "items", "pop", "setdefault", "to", "values", "__getitem__"))


def value_parts(node: ast.AST) -> Iterator[tuple[ast.AST, int, int]]:
    """What an expression's value may be or contain, with the number of calls and the degree of doubt.

    The parts are names, attributes, lambdas and strings: for `a.b.c`, c; for `x if y else z`, x and z; for `make(f)`,
    make (called) and, with doubt, f, which it may return. Keys, comparisons and arithmetic are ignored.
    """
    stack = [(node, 0, 1)]
    while stack:
        part, calls, doubt = stack.pop()
        inner: list[ast.AST] = []
        if isinstance(part, (ast.Name, ast.Attribute, ast.Lambda, ast.Constant, ast.JoinedStr)):
            yield part, calls, doubt
        elif isinstance(part, ast.Call):
            handed = [*part.args, *(keyword.value for keyword in part.keywords)]
            # It may return what it is given, or what a function that it is given makes.
            stack += [(argument, calls, doubt + 4) for argument in handed]
            stack += [(argument, calls + 1, doubt + 4) for argument in handed if isinstance(argument, ast.Name)]
            stack += [(argument.body, calls, doubt + 1) for argument in handed if isinstance(argument, ast.Lambda)]
            if isinstance(part.func, ast.Name) and part.func.id == "getattr" and len(handed) > 1:
                stack += [(one, calls, doubt) for one in _attribute(part.args)]
            hands_out = isinstance(part.func, ast.Attribute) and part.func.attr in HANDS_OUT
            stack.append((part.func, calls + 1, doubt + 4 * hands_out))
            if isinstance(part.func, ast.Attribute) and hands_out:
                inner = [part.func.value]
        elif isinstance(part, ast.Subscript):
            # For annotations, the arguments matter: Optional[Backend], list[Layer].
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


def _attribute(arguments: list[ast.expr]) -> Iterator[ast.Attribute]:
    """`getattr(owner, "name")` as `owner.name`."""
    owner, name = arguments[:2]
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield ast.copy_location(ast.Attribute(owner, name.value, ast.Load()), owner)


def is_value(source: SourceFile, name: str) -> bool:
    """Whether a function of that name is used without a call: stored, passed or returned."""
    called = {id(call.func) for _, call in source.calls.get(name, ())}
    return any(
        ((isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name))
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called
        for node in ast.walk(source.tree)
    )
