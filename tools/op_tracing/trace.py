"""The op trace: the execution graph combined with the chains, as schema/op_traces.schema.json describes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.kernel_tracing.configuration.needs import Settings
from tools.kernel_tracing.report.evaluation import Call, Evaluation
from tools.kernel_tracing.report.merge import described
from tools.kernel_tracing.report.trace_files import settings_of
from tools.kernel_tracing.source.sources import SourceTree
from tools.op_tracing.graph import PHASES, Node, annotation, build, document, nodes, plain_uses

Kernel = tuple[str, str, str, int]
Site = tuple[str, int, str]
#: Configuration -> phases.
Uses = dict[str, set[str]]


def trace(evaluations: Sequence[Evaluation], sources: SourceTree, platform: str, model: str) -> dict[str, Any]:
    """The op trace of evaluated configurations, as a document."""
    settings = {one.configuration.name: settings_of(described(one.configuration, one.resolved)) for one in evaluations}
    root = build(evaluations, model)
    found = _Found(evaluations, settings)
    return {
        "sources": sources.describe(),
        "model": model,
        "platform": platform,
        "ops": [
            {"name": name, "call_sites": _sites(root, name), "kernels": found.kernels(kernels, plain_uses(root, name))}
            for name, kernels in sorted(found.in_forward.items())
        ],
        "graph": document(root, settings),
        "direct_kernels": [
            {**_kernel(kernel), "call_sites": list(map(_site, sites))} for kernel, sites in sorted(found.direct.items())
        ],
        "non_model_ops": [
            {
                "name": name,
                "group": group,
                "when": when,
                "call_sites": list(map(_site, found.outside_sites[group, when, name])),
                "kernels": found.kernels(kernels, {}),
            }
            for (group, when, name), kernels in sorted(found.outside.items())
        ],
    }


class _Found:
    """Which op uses which kernel, in which configurations and phases."""

    def __init__(self, evaluations: Sequence[Evaluation], settings: Mapping[str, Settings]) -> None:
        self.settings = settings
        self.all: Uses = {}
        self.in_forward: dict[str, dict[Kernel, Uses]] = defaultdict(lambda: defaultdict(dict))
        self.outside: dict[tuple[str, str, str], dict[Kernel, Uses]] = defaultdict(lambda: defaultdict(dict))
        self.outside_sites: dict[tuple[str, str, str], dict[Site, None]] = defaultdict(dict)
        self.direct: dict[Kernel, dict[Site, None]] = defaultdict(dict)
        for one in evaluations:
            for call in one.kernels:
                self._add(call, one.configuration.name)

    def _add(self, call: Call, configuration: str) -> None:
        kernel = (call.name, call.source, call.file, call.line)
        frame = call.frames[call.position]
        site = (frame.file, frame.line, frame.function)
        if call.group:
            key = (call.group, call.when, call.op)
            self.outside_sites[key][site] = None
            uses = self.outside[key][kernel]
        else:
            uses = self.in_forward[call.op][kernel]
            if call.position == 0:
                self.direct[kernel][site] = None
        uses.setdefault(configuration, set()).add(call.phase)
        self.all.setdefault(configuration, set()).add(call.phase)

    def kernels(self, found: Mapping[Kernel, Uses], plain: Uses) -> list[dict[str, Any]]:
        """The kernels of one op: those of the first configuration first, then by name.

        Args:
            found: kernel -> when it runs.
            plain: when the op runs no traced kernel.
        """
        everywhere: Uses = {}
        for uses in (*found.values(), plain):
            for name, phases in uses.items():
                everywhere.setdefault(name, set()).update(phases)
        order = {name: number for number, name in enumerate(self.settings)}
        ordered = sorted(found, key=lambda kernel: (min(order[name] for name in found[kernel]), kernel))
        return [
            {
                **_kernel(kernel),
                "condition": annotation(found[kernel], everywhere, self.settings),
                "phases": _phases(found[kernel].values()),
            }
            for kernel in ordered
        ]


def _phases(found: Iterable[set[str]]) -> list[str]:
    every = set().union(*found)
    return [phase for phase in (*PHASES, "min_p", "load") if phase in every]


def _kernel(kernel: Kernel) -> dict[str, Any]:
    name, source, file, line = kernel
    return {"name": name, "source": source, "definition": {"file": file, "line": line}}


def _site(site: Site) -> dict[str, Any]:
    return dict(zip(("file", "line", "function"), site, strict=True))


def _sites(root: Node, name: str) -> list[dict[str, Any]]:
    """Every call site of an op."""
    found = {site: None for node in nodes(root) if node.kind == "op" and node.name == name for site in node.sites}
    return [_site(site) for site in sorted(found)]
