"""The execution graph: what the model's forward calls, in the order in which it does so, down to its ops.

A call that enters the model's own code is a container. A call that leaves it for code that runs kernels is an op; one
that runs only functions of PyTorch is plain torch. The graph merges all runs: what only some of them call says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.runtime_tracing.frames import Frame
from tools.trace.calls import PHASES, TORCH, TracedCall, in_model
from tools.trace.needs import Settings, needs
from tools.trace.order import Moment, Step, in_order

#: Kind, name and function.
NodeKey = tuple[str, str, str]
Site = tuple[str, int, str]


@dataclass(eq=False)
class Node:
    """One call of the model, in all runs that make it.

    Attributes:
        name: what is called.
        kind: container or op.
        function: of a container, what it enters.
        uses: run -> the phases in which it makes the call.
        moments: when each step makes the call first.
        sites: call site -> the runs that use it.
        children: what it calls.
        plain: whether only functions of PyTorch run below it.
    """

    name: str
    kind: str
    function: str = ""
    uses: dict[str, set[str]] = field(default_factory=dict)
    moments: dict[Step, Moment] = field(default_factory=dict)
    sites: dict[Site, set[str]] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)
    plain: bool = True

    def child(self, key: NodeKey) -> Node:
        """The child of this kind, name and function; the last one if it is new."""
        for known in self.children:
            if known.key == key:
                return known
        self.children.append(Node(key[1], key[0], key[2]))
        return self.children[-1]

    @property
    def key(self) -> NodeKey:
        """The key that distinguishes the children of a node."""
        return (self.kind, self.name, self.function)


class Entry(NamedTuple):
    """One call on the way from the model's entry to an op; `frame` makes it, and is None for the entry itself."""

    key: NodeKey
    frame: Frame | None


def build(calls: Iterable[TracedCall], model: str) -> Node:
    """The graph of the calls of several runs. Its root is named after the model; its children are entry classes."""
    root = Node(model, "container")
    for call in calls:
        if not call.group:
            _insert(root, _path(call), (call.run, call.phase), call)
    for node in nodes(root):
        node.children = [node.children[index] for index in in_order([child.moments for child in node.children])]
    return root


def _insert(root: Node, path: Iterable[Entry], step: Step, call: TracedCall) -> None:
    node = root
    run, phase = step
    root.uses.setdefault(run, set()).add(phase)
    for key, frame in path:
        node = node.child(key)
        node.uses.setdefault(run, set()).add(phase)
        moment = Moment(call.order, frame.line if frame else 0, call.layer)
        node.moments[step] = min(moment, node.moments.get(step, moment), key=lambda one: one.order)
        if frame is not None:
            node.sites.setdefault(frame[:3], set()).add(run)
        node.plain &= call.kernel.source == TORCH


def _path(call: TracedCall) -> Iterator[Entry]:
    """From the model's entry to the op: kind, name and function of each node, and its call."""
    at = [index for index, frame in enumerate(call.frames) if in_model(frame.file) and index >= call.position]
    entry = call.frames[at[-1]].function
    yield Entry(("container", entry.partition(".")[0], entry), None)
    for index in reversed(at):
        frame = call.frames[index]
        if index == at[0]:
            yield Entry(("op", call.op, ""), frame)
        else:
            inner = call.frames[at[at.index(index) - 1]].function
            yield Entry(("container", frame.called or inner.rpartition(".")[2], inner), frame)


def document(root: Node, settings: Mapping[str, Settings]) -> dict[str, Any]:
    """The graph as a document.

    Args:
        settings: the settings of each run, by name.
    """
    return _document(root, root, settings)


def _document(node: Node, parent: Node, settings: Mapping[str, Settings]) -> dict[str, Any]:
    sites = [
        {"file": file, "line": line, "function": function}
        | ({"annotation": text} if (text := needs(uses, _of(node.uses, settings))) else {})
        for (file, line, function), uses in sorted(node.sites.items())
    ]
    return {
        "name": node.name,
        "kind": "torch" if node.kind == "op" and node.plain else node.kind,
        "annotation": annotation(node.uses, parent.uses, settings),
        **({"function": node.function} if node.function else {}),
        "call_sites": sites,
        "children": [_document(child, node, settings) for child in node.children],
    }


def annotation(
    uses: Mapping[str, Iterable[str]], parent: Mapping[str, Iterable[str]], settings: Mapping[str, Settings]
) -> str:
    """When a call is made, given that what encloses it is: the settings that it needs, and the phases."""
    found = {phase for phases in uses.values() for phase in phases}
    around = {phase for name in uses for phase in parent.get(name, ())}
    text = needs(uses, _of(parent, settings))
    when = ", ".join(phase for phase in PHASES if phase in found) if found != around else ""
    return "; ".join(filter(None, (text, when)))


def _of(names: Iterable[str], settings: Mapping[str, Settings]) -> dict[str, Settings]:
    return {name: settings[name] for name in names}


def nodes(node: Node) -> Iterator[Node]:
    """A node and all below it."""
    yield node
    for child in node.children:
        yield from nodes(child)
