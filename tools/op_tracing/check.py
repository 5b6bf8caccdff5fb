"""Cross-validation: the op trace and the kernel traces must agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from tools.kernel_tracing.report.evaluation import Evaluation
from tools.op_tracing.graph import NodeKey, paths
from tools.op_tracing.order import Moment

#: From the model's entry to a call.
Path = tuple[NodeKey, ...]
Key = tuple[str, str, str, int]
Pairs = dict[Key, set[str]]


def check(ops: dict[str, Any], kernels: dict[str, Any], evaluations: Iterable[Evaluation] = ()) -> list[str]:
    """Every disagreement between the two documents; each line says which trace to look at.

    Args:
        evaluations: configurations, whose calls must be in the order of the graph. The documents do not say when each
            configuration makes a call.
    """
    return [
        *_same_sources(ops, kernels),
        *_same_pairs(ops, kernels),
        *_same_counts(ops, kernels),
        *_sound_graph(ops),
        *_pairs_have_chains(ops, kernels),
        *_in_order(ops["graph"], evaluations),
    ]


def key(kernel: dict[str, Any]) -> Key:
    """What distinguishes kernels."""
    return (kernel["name"], kernel["source"], kernel["definition"]["file"], kernel["definition"]["line"])


def _all_ops(ops: dict[str, Any]) -> list[dict[str, Any]]:
    return [*ops["ops"], *ops["non_model_ops"]]


def _look(kernel: Key) -> str:
    return f"see the kernel traces of {kernel[0]} ({kernel[1]}): python -m tools.kernel_tracing --kernel {kernel[0]}"


def _same_sources(ops: dict[str, Any], kernels: dict[str, Any]) -> Iterator[str]:
    for field in ("model", "platform", "sources"):
        if ops[field] != kernels[field]:
            yield f"{field}: the op trace is of {ops[field]}, the kernel traces are of {kernels[field]}"


def _same_pairs(ops: dict[str, Any], kernels: dict[str, Any]) -> Iterator[str]:
    found: Pairs = {}
    for op in _all_ops(ops):
        if not op["kernels"]:
            yield f"op {op['name']}: no kernel; see its call sites in the op trace"
        for kernel in op["kernels"]:
            found.setdefault(key(kernel), set()).add(op["name"])
    traced = {key(kernel): set(kernel["ops"]) for kernel in kernels["kernels"]}
    for kernel in sorted(traced.keys() | found.keys()):
        if kernel not in traced:
            yield f"kernel {kernel[0]}: ops {_names(found[kernel])} use it, but the traces lack it; {_look(kernel)}"
        elif kernel not in found:
            yield f"kernel {kernel[0]}: no op uses it; {_look(kernel)}"
        else:
            for name in sorted(traced[kernel] - found[kernel]):
                yield f"kernel {kernel[0]}: its op {name} is not in the op trace; {_look(kernel)}"
            for name in sorted(found[kernel] - traced[kernel]):
                yield f"op {name}: the traces of its kernel {kernel[0]} do not name it; {_look(kernel)}"


def _same_counts(ops: dict[str, Any], kernels: dict[str, Any]) -> Iterator[str]:
    categories = {key(kernel): kernel["category"] for kernel in kernels["kernels"]}
    if len(categories) != len(kernels["kernels"]):
        twice = [name for name, count in Counter(key(kernel) for kernel in kernels["kernels"]).items() if count > 1]
        yield f"kernels: {_names([name[0] for name in twice])} occur more than once in the kernel traces"
    used = {key(kernel) for op in _all_ops(ops) for kernel in op["kernels"]}
    wanted, found = Counter(categories.values()), Counter(categories[one] for one in used if one in categories)
    for category in sorted(wanted):
        if wanted[category] != found[category]:
            yield f"category {category}: {wanted[category]} kernels in the traces, {found[category]} under ops"


def _sound_graph(ops: dict[str, Any]) -> Iterator[str]:
    named = {op["name"] for op in ops["ops"]}
    reached: set[str] = set()
    pending = [(ops["graph"], ops["graph"]["name"])]
    while pending:
        node, path = pending.pop()
        pending += [(child, f"{path} > {child['name']}") for child in node["children"]]
        if node["kind"] == "op":
            reached.add(node["name"])
            if node["name"] not in named:
                yield f"graph: {path} is an op without kernels; see its call sites in the op trace"
        elif node["kind"] == "container" and not node["children"]:
            yield f"graph: {path} is an empty container; see its call sites in the op trace"
    for name in sorted(named - reached):
        yield f"op {name}: it is not in the graph; see its call sites in the op trace"


def _in_order(root: dict[str, Any], evaluations: Iterable[Evaluation]) -> Iterator[str]:
    """What stands in the graph before a sibling that a configuration runs earlier, each pair once."""
    place = {path: number for number, path in enumerate(_paths(root))}
    found: set[tuple[Path, Path]] = set()
    for one in evaluations:
        for (phase, _), moments in _made(one).items():
            made = [path for path in sorted(moments, key=lambda path: moments[path]) if path in place]
            for first, second in pairwise(made):
                if place[first] > place[second] and (first, second) not in found:
                    found.add((first, second))
                    names = " > ".join([root["name"], *(name for _, name, _ in second)])
                    step = f"the {phase} of {one.configuration.name}"
                    yield f"graph: {names} stands before {first[-1][1]}, but {step} runs it later"


def _paths(root: dict[str, Any]) -> Iterator[Path]:
    """The path of each node, in the order of the graph."""
    pending: list[tuple[dict[str, Any], Path]] = [(child, ()) for child in reversed(root["children"])]
    while pending:
        node, above = pending.pop()
        path = (*above, (node["kind"], node["name"], "" if node["kind"] == "op" else node.get("function", "")))
        yield path
        pending += [(child, path) for child in reversed(node["children"])]


def _made(evaluation: Evaluation) -> Mapping[tuple[str, Path], dict[Path, Moment]]:
    """For each phase and each function on the way to an op, the calls that it makes, and when it first makes each."""
    found: dict[tuple[str, Path], dict[Path, Moment]] = defaultdict(dict)
    for phase, entries in paths(evaluation):
        path: Path = ()
        for entry in entries:
            moments = found[phase, path]
            path = (*path, entry.key)
            moments[path] = min(entry.moment, moments.get(path, entry.moment))
    return found


def _pairs_have_chains(ops: dict[str, Any], kernels: dict[str, Any]) -> Iterator[str]:
    places = {
        key(kernel): {
            (frame["file"], frame["line"], frame["function"]) for chain in kernel["chains"] for frame in chain["frames"]
        }
        for kernel in kernels["kernels"]
    }
    for op in _all_ops(ops):
        sites = {_place(site) for site in op["call_sites"]}
        for kernel in op["kernels"]:
            one = key(kernel)
            if one in places and places[one].isdisjoint(sites):
                yield f"op {op['name']}: no chain of {one[0]} passes through a call site of the op; {_look(one)}"


def _place(site: dict[str, Any]) -> tuple[str, int, str]:
    return (site["file"], site["line"], site["function"])


def _names(names: Any) -> str:
    return ", ".join(sorted(names))
