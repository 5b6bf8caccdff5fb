"""Cross-validation: the op trace and the kernel traces must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

Key = tuple[str, str, str, int]
Pairs = dict[Key, set[str]]


def check(ops: dict[str, Any], kernels: dict[str, Any]) -> list[str]:
    """Every disagreement between the two documents; each line says which trace to look at."""
    return [
        *_same_sources(ops, kernels),
        *_same_pairs(ops, kernels),
        *_same_counts(ops, kernels),
        *_sound_graph(ops),
        *_pairs_have_chains(ops, kernels),
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
