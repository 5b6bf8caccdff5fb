"""Lists, tuples, dicts, sets and queues: what their methods store and return."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from tools.kernel_tracing.engine.values import EMPTY, Constant, Container, ValueSet

if TYPE_CHECKING:
    from tools.kernel_tracing.engine.frame import Arguments, Frame

_ADD = {"append", "add", "appendleft", "put", "put_nowait"}
_JOIN = {"extend", "extendleft"}
_TAKE = {"pop", "popleft", "get", "popitem", "next", "__next__", "get_nowait"}
_SAME = {"copy", "values", "keys", "__iter__", "sort", "reverse", "union"}
_OTHER = {"insert", "update", "setdefault", "items"}
METHODS = frozenset(_ADD | _JOIN | _TAKE | _SAME | _OTHER)


def call(frame: Frame, container: Container, name: str, arguments: Arguments, node: ast.expr) -> ValueSet:
    """Call a method of a container."""
    from tools.kernel_tracing.engine.expressions import key_of

    first = arguments.get(0)
    if name in _ADD:
        frame.put(container, "*", first)
    elif name == "insert":
        frame.put(container, "*", arguments.get(1))
    elif name in _JOIN:
        frame.put(container, "*", frame.elements(first))
    elif name == "update":
        update(frame, container, first)
        for key, values in arguments.keywords.items():
            frame.put(container, key, values)
    elif name == "setdefault":
        frame.put(container, key_of(first), arguments.get(1))
        return frame.resolve(frame.items(container, key_of(first)))
    elif name in _TAKE:
        default = arguments.get(1) if name != "popitem" else EMPTY
        return frame.resolve(frame.items(container, key_of(first) if first else "*") | default) or _pending(frame, node)
    elif name == "items":
        pairs = frame.container((node, "items"), "List")
        pair = frame.container((node, "pair"), "Tuple")
        frame.put(pair, 0, frozenset(key for key in frame.read(("keys", container)) if isinstance(key, Constant)))
        frame.put(pair, 1, frame.items(container))
        frame.put(pairs, "*", frozenset((pair,)))
        return frozenset((pairs,))
    elif name in _SAME:
        return frozenset((container,))
    return frame.universe.data


def _pending(frame: Frame, node: ast.expr) -> ValueSet:
    """The value if nothing is stored yet: empty while something may still be stored, then unknown."""
    return EMPTY if frame.solver.waits((frame.context, node, "taken"), frame.context) else frame.universe.any


def update(frame: Frame, container: Container, values: ValueSet) -> None:
    """Copy the items of other containers into one, under their keys."""
    for other in values:
        if isinstance(other, Container):
            for key in frame.read(("keys", other)):
                if isinstance(key, Constant):
                    frame.put(container, key.literal, frame.read(("item", other, key.literal)))
            frame.put(container, "*", frame.read(("item", other, "*")))


def extend(frame: Frame, containers: ValueSet, added: ValueSet) -> None:
    """`containers += added`."""
    for container in containers:
        if isinstance(container, Container):
            frame.put(container, "*", frame.elements(added))
