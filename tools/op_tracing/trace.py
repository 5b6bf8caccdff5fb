"""The op trace: the execution graph combined with the chains, as schema/op_traces.schema.json describes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tools.kernel_tracing.configuration.condition_text import Part, either
from tools.kernel_tracing.graph.chains import Chain
from tools.kernel_tracing.graph.kernels import Kernel
from tools.kernel_tracing.graph.ops import Use, use
from tools.kernel_tracing.report.analysis import Analysis, Progress
from tools.kernel_tracing.report.trace import Writer
from tools.kernel_tracing.rules import runtime_roots
from tools.op_tracing.graph import Graph, Node, Site

Sites = dict[tuple[str, int, str], dict[str, Any]]
#: Kernel -> its alternative conditions: one list of parts per chain.
Alternatives = dict[Kernel, list[list[Part]]]


def trace(analysis: Analysis, progress: Progress | None = None) -> dict[str, Any]:
    """The op trace of an analysis, as a document; `progress` is called with a phase, the steps done and their total."""
    graph = Graph(analysis).build()
    uses = _Uses(analysis, progress)
    sites = _op_sites(graph)
    return {
        "sources": analysis.solver.index.sources.describe(),
        "model": analysis.model,
        "platform": analysis.platform.name,
        "ops": [
            {"name": name, "call_sites": list(sites.get(name, {}).values()), "kernels": uses.kernels(conditions)}
            for name, conditions in sorted(uses.in_forward.items())
        ],
        "graph": _node(graph),
        "direct_kernels": [
            {**_kernel(kernel), "call_sites": list(found.values())} for kernel, found in uses.direct.items()
        ],
        "non_model_ops": [
            {
                "name": name,
                "group": group,
                "when": when,
                "call_sites": list(uses.outside_sites[group, when, name].values()),
                "kernels": uses.kernels(conditions),
            }
            for (group, when, name), conditions in sorted(uses.outside.items())
        ],
    }


class _Uses:
    """Which op uses which kernel, and when, according to all chains."""

    def __init__(self, analysis: Analysis, progress: Progress | None) -> None:
        self.analysis = analysis
        self.writer = Writer(analysis)
        self.in_forward: dict[str, Alternatives] = defaultdict(lambda: defaultdict(list))
        self.outside: dict[tuple[str, str, str], Alternatives] = defaultdict(lambda: defaultdict(list))
        self.outside_sites: dict[tuple[str, str, str], Sites] = defaultdict(dict)
        self.direct: dict[Kernel, Sites] = {}
        for number, kernel in enumerate(analysis.kernels):
            if progress is not None:
                progress("following chains", number, len(analysis.kernels))
            for chain in analysis.chains.of(kernel)[0]:
                self._add(kernel, chain, use(chain, kernel.name, analysis.in_model))

    def _add(self, kernel: Kernel, chain: Chain, found: Use) -> None:
        condition = self.analysis.conditions.below(chain, found.position)
        last = self.writer.chain(chain)[found.position]
        place = (last["file"], last["line"], last["function"])
        site = {"file": last["file"], "line": last["line"], "function": last["function"]}
        if found.in_forward:
            self.in_forward[found.op][kernel].append(condition)
            if found.position == 0:
                self.direct.setdefault(kernel, {})[place] = site
            return
        receiver = getattr(getattr(chain.root.receiver, "info", None), "name", "")
        function = chain.root.function
        group, when = runtime_roots.occasion(function.module.name, receiver, function.qualname.rpartition(".")[2])
        self.outside[group, when, found.op][kernel].append(condition)
        self.outside_sites[group, when, found.op].setdefault(place, site)

    def kernels(self, conditions: Alternatives) -> list[dict[str, Any]]:
        """The kernels of one op, by name."""
        ordered = sorted(conditions, key=lambda kernel: kernel.key)
        return [{**_kernel(kernel), "condition": either(conditions[kernel])} for kernel in ordered]


def _kernel(kernel: Kernel) -> dict[str, Any]:
    definition = {"file": kernel.file, "line": kernel.line}
    return {"name": kernel.name, "source": kernel.source, "definition": definition}


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _op_sites(graph: Node) -> dict[str, Sites]:
    """Every call site of every op."""
    found: dict[str, Sites] = defaultdict(dict)
    for node in _nodes(graph):
        if node.kind == "op":
            for site in node.call_sites:
                written = _site(site)
                if node.annotation and "annotation" not in written:
                    written["annotation"] = node.annotation
                found[node.name].setdefault((site.file, site.line, site.function), written)
    return {name: dict(sorted(sites.items())) for name, sites in found.items()}


def _site(site: Site) -> dict[str, Any]:
    written: dict[str, Any] = {"file": site.file, "line": site.line, "function": site.function}
    return {**written, "annotation": site.annotation} if site.annotation else written


def _node(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "kind": node.kind,
        "annotation": node.annotation,
        **({"function": node.function} if node.function else {}),
        "call_sites": [_site(site) for site in node.call_sites],
        "children": [_node(child) for child in node.children],
    }
