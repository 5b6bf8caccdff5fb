"""What may differ from process to process, or from call to call, without a random number.

The text of a function holds its address, and sets are ordered by salted hashes, which is why `allowed` lists none.
Memory that nobody filled holds what earlier calls left. A reference that decides by any of these passes a verification
in some processes and fails it in others.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

__all__ = ["Add", "check_memory", "check_text"]

#: Adds one violation: rule, node, message, hint.
Add = Callable[[str, ast.AST, str, str], None]

RULE = "reference-undetermined"
_TEXT_HINT = "make text of values in messages of errors only"
#: Functions of torch that give memory as it was, and methods that write to all of it.
_MEMORY = frozenset({"empty", "empty_like"})
_FILL = frozenset({"exponential_", "uniform_"})


def check_text(nodes: list[ast.AST], add: Add) -> None:
    """Refuses f-strings, and text that `%` can put values into, but in docstrings and messages of errors."""
    said = {id(part) for node in nodes for place in _places(node) for part in ast.walk(place)}
    for node in nodes:
        if id(node) in said:
            continue
        if isinstance(node, ast.JoinedStr):
            said |= {id(part) for part in ast.walk(node)}
            add(RULE, node, "an f-string can tell where a function lies in memory", _TEXT_HINT)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and "%" in repr(node.value):
            add(RULE, node, "values can be put into a text with %", _TEXT_HINT)


def _places(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of a node in which any text may stand."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    elif isinstance(node, ast.Assert) and node.msg is not None:
        yield node.msg
    elif isinstance(node, ast.Raise) and node.exc is not None:
        yield node.exc


def check_memory(nodes: list[ast.AST], bound: Mapping[str, str], add: Add) -> None:
    """Refuses memory that is not filled at once.

    Args:
        nodes: of the reference.
        bound: local name -> dotted path of the module or member that an import gave it.
        add: what to call with each violation.
    """
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    filled = {id(c.func.value) for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in _FILL}
    called = {id(call.func) for call in calls if id(call) in filled}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Name) and node.id in bound:
            name = bound[node.id].rpartition(".")[2]
        else:
            continue
        if name in _MEMORY and id(node) not in called:
            hint = f"write {name}(...).exponential_() or .uniform_()"
            add(RULE, node, f"the memory of {name}() is used before it is filled", hint)
