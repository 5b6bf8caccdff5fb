"""Annotations of plain data: a value declared as a number or tensor calls nothing, whatever seems to flow into it."""

from __future__ import annotations

import ast
import re

from tools.kernel_tracing.source.syntax import last_name

_DATA = {
    "int",
    "float",
    "bool",
    "bytes",
    "complex",
    "None",
    "Tensor",
    "dtype",
    "device",
    "Size",
    "ndarray",
    "Generator",
}
_GENERIC = {"Optional", "Union", "List", "list", "Tuple", "tuple", "Dict", "dict", "Set", "set", "Sequence", "Iterable"}
_TEXT = {"str"}  # data inside containers; on its own, it may be the key of a registry


NUMBERS = {"int", "float", "bool", "str", "bytes"}
_PLAIN = re.compile(
    r"\b(?:int|float|bool|str|bytes|None|Optional|Union|[Ll]ist|[Tt]uple|[Ss]equence|typing)\b|\W|\.\.\."
)


def may_hold_tensor(annotation: ast.expr | None) -> bool:
    """Whether a parameter with this annotation may be given a tensor; without an annotation, it may."""
    return annotation is None or bool(_PLAIN.sub("", ast.unparse(annotation)))


def is_data(annotation: ast.expr | None, inside: bool = False) -> bool:
    """Whether an annotation admits only numbers, tensors and containers of these."""
    if isinstance(annotation, ast.Constant):
        if annotation.value is None or annotation.value is Ellipsis:
            return True
        if isinstance(annotation.value, str):
            try:
                return is_data(ast.parse(annotation.value, mode="eval").body, inside)
            except SyntaxError:
                return False
        return False
    if isinstance(annotation, (ast.Name, ast.Attribute)):
        name = annotation.id if isinstance(annotation, ast.Name) else annotation.attr
        return name in _DATA or (inside and name in _TEXT)
    if isinstance(annotation, ast.BinOp):
        return is_data(annotation.left, inside) and is_data(annotation.right, inside)
    if isinstance(annotation, ast.Subscript):
        outer = last_name(annotation.value)
        parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return outer in _GENERIC and all(is_data(part, outer not in ("Optional", "Union")) for part in parts)
    return False
