"""Annotations: which parameters may be given tensors."""

from __future__ import annotations

import ast
import re

#: Results that are no tensors.
NUMBERS = {"int", "float", "bool", "str", "bytes"}
_PLAIN = re.compile(
    r"\b(?:int|float|bool|str|bytes|None|Optional|Union|[Ll]ist|[Tt]uple|[Ss]equence|typing)\b|\W|\.\.\."
)


def may_hold_tensor(annotation: ast.expr | None) -> bool:
    """Whether a parameter with this annotation may be given a tensor; without an annotation, it may."""
    return annotation is None or bool(_PLAIN.sub("", ast.unparse(annotation)))
