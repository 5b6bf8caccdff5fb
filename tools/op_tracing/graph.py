"""The execution graph: what the model's forward calls, in the order in which it does so, down to its ops.

A call that enters the model's own code is a container. A call that leaves it for code that runs kernels is an op. A
module that runs no kernels is plain torch. The graph merges all configurations: what only some of them call says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.kernel_tracing.configuration.needs import Settings, needs
from tools.kernel_tracing.report.evaluation import Call, Evaluation, Frame
from tools.kernel_tracing.report.ops import in_model
from tools.op_tracing.order import Moment, Step, in_order

#: The phases of a step that runs the model, in the order in which a request meets them.
PHASES = ("prefill", "decode", "extend")
#: Kind, name and function.
NodeKey = tuple[str, str, str]
Site = tuple[str, int, str]


@dataclass(eq=False)
class Node:
    """One call of the model, in all configurations that make it.

    Attributes:
        name, kind, function: as in schema/op_traces.schema.json.
        uses: configuration -> the phases in which it makes the call.
        moments: when each step makes the call first.
        sites: call site -> the configurations that use it.
        children: what it calls.
    """

    name: str
    kind: str
    function: str = ""
    uses: dict[str, set[str]] = field(default_factory=dict)
    moments: dict[Step, Moment] = field(default_factory=dict)
    sites: dict[Site, set[str]] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    def child(self, key: NodeKey) -> Node:
        """The child of this kind, name and function; the last one if it is new."""
        for known in self.children:
            if known.key == key:
                return known
        self.children.append(Node(key[1], key[0], key[2]))
        return self.children[-1]

    @property
    def key(self) -> NodeKey:
        """What distinguishes the children of a node."""
        return (self.kind, self.name, self.function)


class Entry(NamedTuple):
    """One call on the way from the model's entry to an op; `frame` makes it, and is None for the entry itself."""

    key: NodeKey
    frame: Frame | None
    moment: Moment


def build(evaluations: Sequence[Evaluation], model: str) -> Node:
    """The graph of several configurations. Its root is named after the model; the root's children are entry classes."""
    root = Node(model, "container")
    for one in evaluations:
        for phase, path in paths(one):
            _insert(root, path, (one.configuration.name, phase))
    for node in nodes(root):
        node.children = [node.children[index] for index in in_order([child.moments for child in node.children])]
    return root


def paths(evaluation: Evaluation) -> Iterator[tuple[str, list[Entry]]]:
    """The ops and the plain modules that a configuration runs: the phase, and the calls that lead there."""
    for call in (*evaluation.kernels, *evaluation.modules):
        if call.phase in PHASES and not call.group:
            yield call.phase, list(_path(call))


def _insert(root: Node, path: Iterable[Entry], step: Step) -> None:
    node = root
    configuration, phase = step
    root.uses.setdefault(configuration, set()).add(phase)
    for key, frame, moment in path:
        node = node.child(key)
        node.uses.setdefault(configuration, set()).add(phase)
        node.moments[step] = min(moment, node.moments.get(step, moment))
        if frame is not None:
            node.sites.setdefault((frame.file, frame.line, frame.function), set()).add(configuration)


def _path(call: Call) -> Iterator[Entry]:
    """From the model's entry to the op (or the plain module): kind, name and function of each node, and its call."""
    plain = call.source == "torch"
    end = 0 if plain else call.position
    at = [index for index, frame in enumerate(call.frames) if in_model(frame.file) and index >= end]
    entry = call.frames[at[-1]].function
    yield Entry(("container", entry.partition(".")[0], entry), None, Moment((0, 0), call.order, plain))
    for index in reversed(at):
        moment = Moment(call.places[index], call.order, plain)
        if index == at[0]:
            name = call.called[index] if plain else call.op
            key = ("torch", name, f"{call.name}.forward") if plain else ("op", name, "")
        else:
            inner = at[at.index(index) - 1]
            key = ("container", call.called[index], call.frames[inner].function)
        yield Entry(key, call.frames[index], moment)


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
        for (file, line, function), uses in sorted(node.sites.items())
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


def plain_uses(root: Node, op: str) -> dict[str, set[str]]:
    """The configurations and phases in which what calls an op runs a module of its name instead, in plain torch."""
    found: dict[str, set[str]] = {}
    for node in nodes(root):
        if any(child.kind == "op" and child.name == op for child in node.children):
            for plain in (child for child in node.children if child.kind == "torch" and child.name == op):
                for configuration, phases in plain.uses.items():
                    found.setdefault(configuration, set()).update(phases)
    return found
