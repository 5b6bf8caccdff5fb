"""The execution graph: what the model's forward calls, in execution order, down to its ops.

A call that enters the model's own code is a container. A call that leaves it for code that runs kernels is an op. A
call of a module that runs no kernels is plain torch. Framework code that calls back into the model (two-batch overlap,
hooks) is a container of what it calls.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tools.kernel_tracing.engine.models.modules import is_forward
from tools.kernel_tracing.engine.solver import Context, Edge, KernelCall
from tools.kernel_tracing.graph.chains import place
from tools.kernel_tracing.graph.ops import OWN_WEIGHT, called_name, weight_owner
from tools.kernel_tracing.report.analysis import Analysis
from tools.kernel_tracing.source.declarations import FunctionInfo
from tools.op_tracing.order import execution_order


@dataclass(frozen=True)
class Site:
    """A call site, and the condition under which it is used."""

    file: str
    line: int
    function: str
    annotation: str = ""


@dataclass(frozen=True)
class Node:
    """One call of the model and what it calls. See schema/op_traces.schema.json."""

    name: str
    kind: str
    annotation: str = ""
    function: str = ""
    call_sites: tuple[Site, ...] = ()
    children: tuple[Node, ...] = ()


@dataclass
class _Item:
    """One child while it is being built."""

    name: str
    kind: str
    function: str = ""
    sites: dict[Site, None] = field(default_factory=dict)
    children: tuple[Node, ...] = ()


@dataclass(frozen=True)
class _Body:
    """What a function calls; `own`: kernel calls with the weight of its own module, which make a call of it an op."""

    children: tuple[Node, ...]
    own: tuple[Site, ...] = ()


@dataclass(frozen=True)
class _Below:
    """What framework code leads to: whether to kernels, and to which functions of the model first."""

    kernels: bool
    entered: tuple[Edge, ...]


class Graph:
    """Builds the execution graph of one analysis."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self._edges: dict[Context, list[Edge]] = defaultdict(list)
        for edge in sorted(analysis.chains.edges, key=lambda edge: place(edge.caller, edge.call)):
            self._edges[edge.caller].append(edge)
        self._kernels: dict[Context, list[KernelCall]] = defaultdict(list)
        for call in analysis.solver.kernel_calls.values():
            self._kernels[call.caller].append(call)
        self._orders: dict[FunctionInfo, dict[ast.AST, tuple[int, str]]] = {}
        self._bodies: dict[frozenset[Context], _Body | None] = {}
        self._belows: dict[Context, _Below] = {}

    def build(self) -> Node:
        """The graph. Its root is named after the model; the root's children are the entry classes."""
        entries: dict[_Body, list[str]] = defaultdict(list)
        functions: dict[_Body, FunctionInfo] = {}
        for info in self.analysis.entries:
            contexts = [end for end in self.analysis.ends if getattr(end.receiver, "info", None) is info]
            for function, group in _by_function(contexts).items():
                body = self._body(group)
                entries[body].append(info.name)
                functions.setdefault(body, function)
        nodes = []
        for body, names in entries.items():
            also = f"also {', '.join(names[1:])}" if names[1:] else ""
            nodes.append(Node(names[0], "container", also, functions[body].qualname, (), body.children))
        return _once(Node(self.analysis.model, "container", children=tuple(nodes)))

    def _body(self, contexts: frozenset[Context]) -> _Body:
        """Everything that a function of the model calls in any of its contexts."""
        known = self._bodies.get(contexts, ...)
        if known is None:
            return _Body(())  # recursion: a caller is already building it
        if isinstance(known, _Body):
            return known
        self._bodies[contexts] = None
        function = next(iter(contexts)).function
        order = self._order(function)
        items: dict[tuple[str, str, str], _Item] = {}
        own: dict[Site, None] = {}
        for call in sorted(self._calls(contexts), key=lambda call: order.get(call, (len(order), ""))):
            kernels = [one for context in contexts for one in self._kernels[context] if one.call is call]
            for kernel in kernels:
                owner, terminal = weight_owner(call), kernel.name.rpartition(".")[2]
                path = [f"{terminal} path"] if owner else []
                condition = self.analysis.conditions.of_guards(kernel.caller, kernel.guards)
                site = self._site(kernel.caller, call, [*path, condition])
                if owner == OWN_WEIGHT:
                    own[site] = None
                else:
                    _add(items, _Item(owner or terminal, "op", sites={site: None}))
            edges = [edge for context in contexts for edge in self._edges[context] if edge.call is call]
            for item in self._entered(edges):
                _add(items, item)
        body = _Body(tuple(_finished(item) for item in items.values()), tuple(own))
        self._bodies[contexts] = body
        return body

    def _calls(self, contexts: frozenset[Context]) -> dict[ast.AST, None]:
        calls = [edge.call for context in contexts for edge in self._edges[context]]
        return dict.fromkeys(calls + [kernel.call for context in contexts for kernel in self._kernels[context]])

    def _entered(self, edges: list[Edge]) -> Iterable[_Item]:
        """What one call of the model's code leads to."""
        inside = [edge for edge in edges if self.analysis.in_model(edge.callee)]
        for function, contexts in _by_function(edge.callee for edge in inside).items():
            chosen = [edge for edge in inside if edge.callee in contexts]
            sites = {self._edge_site(edge): None for edge in chosen}
            body = self._body(contexts)
            name = called_name(chosen[0].call)
            if body.own:
                yield _Item(name, "op", function.qualname, sites | dict.fromkeys(body.own), body.children)
            elif body.children:
                yield _Item(name, "container", function.qualname, sites, body.children)
            elif is_forward(self.analysis.solver.index, chosen[0].callee):
                yield _Item(name, "torch", function.qualname, sites)
        outside = [edge for edge in edges if not self.analysis.in_model(edge.callee)]
        if outside:
            yield from self._left(outside)

    def _left(self, edges: list[Edge]) -> Iterable[_Item]:
        """What a call that leaves the model's code leads to."""
        belows = [self._below(edge.callee) for edge in edges]
        of_guards = self.analysis.conditions.of_guards
        sites = {self._site(edge.caller, edge.call, [of_guards(edge.caller, edge.guards)]): None for edge in edges}
        name = called_name(edges[0].call)
        children: dict[tuple[str, str, str], _Item] = {}
        entered = {edge: None for below in belows for edge in below.entered}
        for function, contexts in _by_function(edge.callee for edge in entered).items():
            body = self._body(contexts)
            if body.children:
                back = {self._edge_site(edge): None for edge in entered if edge.callee in contexts}
                terminal = function.qualname.rpartition(".")[2]
                _add(children, _Item(terminal, "container", function.qualname, back, body.children))
        nodes = tuple(_finished(item) for item in children.values())
        if any(below.kernels for below in belows):
            yield _Item(name, "op", "", sites, nodes)
        elif nodes:
            yield _Item(name, "container", edges[0].callee.function.qualname, sites, nodes)
        elif any(is_forward(self.analysis.solver.index, edge.callee) for edge in edges):
            yield _Item(name, "torch", edges[0].callee.function.qualname, sites)

    def _below(self, context: Context) -> _Below:
        """Kernels and functions of the model that framework code leads to."""
        known = self._belows.get(context)
        if known is None:
            entered: list[Edge] = []
            kernels = False
            seen = {context: None}
            pending = [context]
            while pending:
                current = pending.pop()
                kernels = kernels or bool(self._kernels.get(current))
                for edge in self._edges.get(current, ()):
                    if self.analysis.in_model(edge.callee):
                        entered.append(edge)
                    elif edge.callee not in seen:
                        seen[edge.callee] = None
                        pending.append(edge.callee)
            known = self._belows[context] = _Below(kernels, tuple(entered))
        return known

    def _order(self, function: FunctionInfo) -> dict[ast.AST, tuple[int, str]]:
        if function not in self._orders:
            self._orders[function] = execution_order(function)
        return self._orders[function]

    def _edge_site(self, edge: Edge) -> Site:
        return self._site(edge.caller, edge.call, [self.analysis.conditions.of_edge(edge)])

    def _site(self, caller: Context, call: ast.AST, texts: Iterable[str]) -> Site:
        loop = self._order(caller.function).get(call, (0, ""))[1]
        parts = [text for text in [loop, *texts] if text]
        annotation = " and ".join(dict.fromkeys(parts))
        return Site(caller.function.module.file, getattr(call, "lineno", 1), caller.function.qualname, annotation)


def _by_function(contexts: Iterable[Context]) -> dict[FunctionInfo, frozenset[Context]]:
    groups: dict[FunctionInfo, list[Context]] = defaultdict(list)
    for context in contexts:
        groups[context.function].append(context)
    return {function: frozenset(group) for function, group in groups.items()}


def _add(items: dict[tuple[str, str, str], _Item], new: _Item) -> None:
    """Merges calls of the same op, or of the same function, into one node."""
    key = (new.name, new.kind, new.function)
    known = items.setdefault(key, new)
    if known is not new:
        known.sites |= new.sites
        known.children = _union(known.children, new.children)


def _union(first: tuple[Node, ...], second: tuple[Node, ...]) -> tuple[Node, ...]:
    return first + tuple(node for node in second if node not in first)


def _finished(item: _Item) -> Node:
    """The finished node; an annotation that all sites share becomes the node's."""
    sites = tuple(item.sites)
    shared = {site.annotation for site in sites}
    annotation = ""
    if len(shared) == 1:
        annotation = shared.pop()
        sites = tuple(dict.fromkeys(replace(site, annotation="") for site in sites))
    return Node(item.name, item.kind, annotation, item.function, sites, item.children)


def _once(root: Node) -> Node:
    """The graph with every container expanded once; later occurrences of it have the kind `again`."""
    seen: set[tuple[str, tuple[Node, ...]]] = set()

    def visit(node: Node) -> Node:
        if node.kind == "container" and node.function and node.children:
            key = (node.function, node.children)
            if key in seen:
                return replace(node, kind="again", children=())
            seen.add(key)
        return replace(node, children=tuple(visit(child) for child in node.children))

    return visit(root)
