"""The execution graph: what the model's forward calls, in the order of a real step, down to its ops.

A call that enters the model's own code is a container. A call that leaves it for code that runs kernels is an op. A
module that runs no kernels is plain torch. The graph merges all configurations: what only some of them call says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.kernel_tracing.configuration.needs import Settings, needs
from tools.kernel_tracing.report.evaluation import Call, Evaluation, Frame
from tools.kernel_tracing.report.ops import in_model

#: The phases of a step that runs the model, in the order in which a request meets them.
PHASES = ("prefill", "decode", "extend")
Key = tuple[str, str, str]
Site = tuple[str, int, str]


@dataclass(eq=False)
class Node:
    """One call of the model, in all configurations that make it.

    Attributes:
        name, kind, function: as in schema/op_traces.schema.json.
        uses: configuration -> the phases in which it makes the call.
        sites: call site -> the configurations that use it.
        children: what it calls.
    """

    name: str
    kind: str
    function: str = ""
    uses: dict[str, set[str]] = field(default_factory=dict)
    sites: dict[Site, set[str]] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    def child(self, key: Key, after: Node | None) -> Node:
        """The child of this kind, name and function.

        A new one stands last while only one configuration is known, whose calls come in order; then behind another.
        """
        for known in self.children:
            if (known.kind, known.name, known.function) == key:
                return known
        new = Node(key[1], key[0], key[2])
        behind = self.children.index(after) + 1 if after is not None else 0
        self.children.insert(len(self.children) if len(self.uses) <= 1 else behind, new)
        return new


def build(evaluations: Sequence[Evaluation], model: str) -> Node:
    """The graph of several configurations. Its root is named after the model; the root's children are entry classes."""
    root = Node(model, "container")
    for one in evaluations:
        for phase in PHASES:
            last: dict[int, Node] = {}
            calls = [call for call in (*one.kernels, *one.modules) if call.phase == phase and not call.group]
            for call in sorted(calls, key=lambda call: (call.order, call.source != "torch")):
                _insert(root, call, one.configuration.name, last)
    return root


def _insert(root: Node, call: Call, configuration: str, last: dict[int, Node]) -> None:
    node = root
    root.uses.setdefault(configuration, set()).add(call.phase)
    for key, frame in _path(call):
        child = node.child(key, last.get(id(node)))
        last[id(node)] = child
        child.uses.setdefault(configuration, set()).add(call.phase)
        if frame is not None:
            child.sites.setdefault((frame.file, frame.line, frame.function), set()).add(configuration)
        node = child


def _path(call: Call) -> Iterator[tuple[Key, Frame | None]]:
    """From the model's entry to the op (or the plain module): kind, name and function of each node, and its call."""
    end = 0 if call.source == "torch" else call.position
    at = [index for index, frame in enumerate(call.frames) if in_model(frame.file) and index >= end]
    entry = call.frames[at[-1]].function
    yield ("container", entry.partition(".")[0], entry), None
    for index in reversed(at):
        if index == at[0]:
            kind = "torch" if call.source == "torch" else "op"
            name = call.called[index] if kind == "torch" else call.op
            yield (kind, name, f"{call.name}.forward" if kind == "torch" else ""), call.frames[index]
        else:
            inner = at[at.index(index) - 1]
            yield ("container", call.called[index], call.frames[inner].function), call.frames[index]


def document(root: Node, settings: Mapping[str, Settings]) -> dict[str, Any]:
    """The graph as a document.

    Args:
        settings: the settings of each configuration, by name.
    """
    return _document(root, root, settings)


def _document(node: Node, parent: Node, settings: Mapping[str, Settings]) -> dict[str, Any]:
    sites = [
        {"file": file, "line": line, "function": function}
        | ({"annotation": text} if (text := needs(uses, _of(node.uses, settings))) else {})
        for (file, line, function), uses in node.sites.items()
    ]
    return {
        "name": node.name,
        "kind": node.kind,
        "annotation": annotation(node.uses, parent.uses, settings),
        **({"function": node.function} if node.function else {}),
        **({"phases": _phases(node)} if node.kind == "torch" else {}),
        "call_sites": sites,
        "children": [_document(child, node, settings) for child in node.children],
    }


def _phases(node: Node) -> list[str]:
    return [phase for phase in PHASES if any(phase in phases for phases in node.uses.values())]


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
