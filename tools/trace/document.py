"""The trace of a model as a document: its kernels with all chains, the order of its calls, its ops and their graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashinfer_trace.format.files import COMPACT, Lines, laid_out
from tools.runtime_tracing.frames import Frame
from tools.runtime_tracing.recording import Recording
from tools.trace.calls import PHASES, Kernel, TracedCall, settings_of, traced
from tools.trace.graph import annotation, build, document, nodes
from tools.trace.needs import Settings, needs

Site = tuple[str, int, str]
#: Run -> phases.
Uses = dict[str, set[str]]
#: A kernel and its chain.
Chain = tuple[Kernel, tuple[Frame, ...]]
FRAME = ("file", "line", "function", "called")


def trace(runs: Sequence[Recording], model: str) -> dict[str, Any]:
    """The trace of recorded runs of one release of SGLang.

    A kernel's chains are in the order of the runs: those of the first, in execution order, come first.

    Args:
        runs: the default first.
        model: what the document is called.
    """
    settings = {run.name: settings_of(run) for run in runs}
    calls = {run.name: list(traced(run)) for run in runs}
    every = [call for of_run in calls.values() for call in of_run]
    chains: dict[Chain, list[TracedCall]] = defaultdict(list)
    for call in every:
        chains[call.kernel, call.frames].append(call)
    root = build(every, model)
    found = _Found(every, settings)
    return {
        "model": model,
        "sources": _versions(runs),
        "platform": ", ".join(sorted({one["gpu"] for one in settings.values()})),
        "configurations": [_described(run, settings[run.name]) for run in runs],
        "kernels": _kernels(chains, settings),
        "sequence": _sequence(calls, chains, settings),
        "ops": [
            {"name": name, "call_sites": _sites(root, name), "kernels": found.kernels(kernels)}
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
                "kernels": found.kernels(kernels),
            }
            for (group, when, name), kernels in sorted(found.outside.items())
        ],
    }


def _versions(runs: Sequence[Recording]) -> dict[str, str]:
    """Distribution -> its version; a GPU is not one."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for run in runs:
        for name, version in run.document["versions"].items():
            if name != "gpu":
                found[name][version] = None
    return {name: ", ".join(versions) for name, versions in found.items()}


def _described(run: Recording, settings: Settings) -> dict[str, Any]:
    document = run.document
    return {
        "name": run.name,
        **{name: settings[name] for name in ("model", "architecture", "quantization", "gpu")},
        "server": dict(document["server"]),
        "environment": dict(document["environment"]),
        "resolved": dict(document["resolved"]),
        "stand_ins": list(run.stand_ins),
    }


def _kernels(chains: Mapping[Chain, Sequence[TracedCall]], settings: Mapping[str, Settings]) -> list[dict[str, Any]]:
    by_kernel: dict[Kernel, list[Sequence[TracedCall]]] = defaultdict(list)
    for (kernel, _), calls in chains.items():
        by_kernel[kernel].append(calls)
    return [
        {
            **_kernel(kernel),
            "category": kernel.category,
            "ops": sorted({calls[0].op for calls in by_kernel[kernel]}),
            "through": sorted(
                {path for calls in by_kernel[kernel] for call in calls for path in call.recorded.through}
            ),
            "chains": [_chain(calls, settings) for calls in by_kernel[kernel]],
        }
        for kernel in sorted(by_kernel)
    ]


def _chain(calls: Sequence[TracedCall], settings: Mapping[str, Settings]) -> dict[str, Any]:
    uses: Uses = {}
    for call in calls:
        uses.setdefault(call.run, set()).add(call.phase)
    return {
        "frames": [dict(zip(FRAME, frame, strict=True)) for frame in calls[0].frames],
        "op": calls[0].op,
        "group": calls[0].group,
        "configurations": {run: _phases([phases]) for run, phases in uses.items()},
        "needs": needs(uses.keys(), settings),
    }


def _sequence(
    calls: Mapping[str, Sequence[TracedCall]],
    chains: Mapping[Chain, Sequence[TracedCall]],
    settings: Mapping[str, Settings],
) -> list[dict[str, Any]]:
    """The chains in execution order: those of the default run, then the others, grouped by the runs that take them."""
    taken = {chain: tuple(dict.fromkeys(call.run for call in found)) for chain, found in chains.items()}
    default, *_ = [*calls, ""]
    groups: dict[tuple[str, ...], dict[Chain, None]] = {(default,): {}}
    for of_run in calls.values():
        for call in of_run:
            chain = call.kernel, call.frames
            group = (default,) if default in taken[chain] else taken[chain]
            groups.setdefault(group, {})[chain] = None
    return [
        {
            "needs": "" if group == (default,) else needs(group, settings),
            "configurations": list(group),
            "calls": [
                {
                    **_kernel(chain[0]),
                    "op": chains[chain][0].op,
                    "phases": _phases([{call.phase for call in chains[chain] if call.run in group}]),
                    "frames": [dict(zip(FRAME, frame, strict=True)) for frame in chain[1]],
                }
                for chain in of_group
            ],
        }
        for group, of_group in groups.items()
        if of_group
    ]


class _Found:
    """Which op uses which kernel, in which runs and phases."""

    def __init__(self, calls: Iterable[TracedCall], settings: Mapping[str, Settings]) -> None:
        self.settings = settings
        self.in_forward: dict[str, dict[Kernel, Uses]] = defaultdict(lambda: defaultdict(dict))
        self.outside: dict[tuple[str, str, str], dict[Kernel, Uses]] = defaultdict(lambda: defaultdict(dict))
        self.outside_sites: dict[tuple[str, str, str], dict[Site, None]] = defaultdict(dict)
        self.direct: dict[Kernel, dict[Site, None]] = defaultdict(dict)
        for call in calls:
            if call.group:
                key = (call.group, call.when, call.op)
                self.outside_sites[key][call.site] = None
                uses = self.outside[key][call.kernel]
            else:
                uses = self.in_forward[call.op][call.kernel]
                if call.position == 0:
                    self.direct[call.kernel][call.site] = None
            uses.setdefault(call.run, set()).add(call.phase)

    def kernels(self, found: Mapping[Kernel, Uses]) -> list[dict[str, Any]]:
        """The kernels of one op: those of the first run first, then by name.

        Args:
            found: kernel -> when it runs.
        """
        everywhere: Uses = {}
        for uses in found.values():
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
    return [phase for phase in PHASES if phase in every] + sorted(every.difference(PHASES))


def _kernel(kernel: Kernel) -> dict[str, Any]:
    return {"name": kernel.name, "source": kernel.source, "path": kernel.path}


def _site(site: Site) -> dict[str, Any]:
    return dict(zip(FRAME, site, strict=False))


def _sites(root: Any, name: str) -> list[dict[str, Any]]:
    """Every call site of an op."""
    return [
        _site(one)
        for one in sorted({s for node in nodes(root) if (node.kind, node.name) == ("op", name) for s in node.sites})
    ]


def dumps(document: Mapping[str, Any]) -> str:
    """The document as JSON, in which each frame is written once, in the table `frames`."""
    table: dict[tuple[Any, ...], int] = {}

    def packed(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: [table.setdefault(tuple(frame.values()), len(table)) for frame in item]
                if key == "frames"
                else packed(item)
                for key, item in value.items()
            }
        return [packed(item) for item in value] if isinstance(value, list) else value

    content = packed(dict(document))
    return laid_out({**content, "frames": [list(frame) for frame in table]}, _lines, COMPACT)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(0, closing=0)
        case ("kernels" | "sequence" | "ops" | "direct_kernels" | "non_model_ops" | "configurations" | "frames",):
            return Lines(1)
        case ("graph", *_, "children"):
            return Lines(path.count("children"))
        case ("graph",) | ("graph", *_, "children", "*"):
            return Lines(None)
    return None
