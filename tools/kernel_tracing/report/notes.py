"""The notes of the report, derived from the conditions in the trace; no condition is known by name here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from tools.kernel_tracing.configuration.condition_text import TEST, rank, split_condition
from tools.shared.markdown import code, escape, table

# More names than this make a table cell unreadable.
LONGEST_LIST = 12


def notes(kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines on what is reached only under a condition, per quantisation, and through approximate hops."""
    always: list[str] = []
    chains: dict[str, int] = defaultdict(int)
    required: dict[str, list[str]] = defaultdict(list)
    sometimes: dict[str, list[str]] = defaultdict(list)
    ops: dict[str, set[str]] = defaultdict(set)
    reasons: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    approximate: dict[str, set[str]] = defaultdict(set)
    for kernel in kernels:
        per_chain = []
        for chain in kernel["chains"]:
            conditions = {part for frame in chain for part in split_condition(frame["condition"])}
            per_chain.append(conditions)
            for condition in conditions:
                chains[condition] += 1
                ops[condition].update(kernel["ops"])
            for frame in chain:
                if frame.get("approximate"):
                    reasons[frame["approximate"]].add((frame["file"], frame["line"], frame["function"], frame["call"]))
                    approximate[frame["approximate"]].add(kernel["name"])
        common = set.intersection(*per_chain) if per_chain else set()
        if any(not conditions for conditions in per_chain):
            always.append(kernel["name"])
        for condition in set().union(*per_chain):
            (required if condition in common else sometimes)[condition].append(kernel["name"])
    lines = [f"Kernels that at least one chain reaches without any condition: {_names(always)}."]
    header = ("Condition", "Needed by every chain of", "Needed by some chains of", "Chains")
    for title, configured in (("Configurations and layers", True), ("Conditions in the sources", False)):
        lines += ["", f"### {title}", ""]
        rows = [
            (f"**{escape(part)}**", _names(required[part]), _names(sometimes[part]), str(chains[part]))
            for part in sorted(chains)
            if (rank(part) != TEST) == configured
        ]
        lines += table(header, rows) if rows else ["None."]
    lines += ["", "### Quantisation variants", ""]
    variants = [
        (f"**{escape(condition)}**", _names([*required[condition], *sometimes[condition]]), _names(ops[condition]))
        for condition in sorted(chains)
        if "quant" in condition.lower()
    ]
    lines += table(("Variant", "Kernels", "Ops"), variants) if variants else ["No chain depends on quantisation."]
    lines += ["", "### Approximate hops", ""]
    if not reasons:
        return [*lines, "There are no approximate hops."]
    hops = [
        (escape(reason), str(len(reasons[reason])), _names(approximate[reason]))
        for reason in sorted(reasons, key=lambda reason: (-len(reasons[reason]), reason))
    ]
    return [*lines, *table(("Why a hop may not happen", "Call sites", "Kernels"), hops)]


def _names(names: Iterable[str]) -> str:
    ordered = sorted(set(names), key=lambda name: (name.lower(), name))
    shown = ", ".join(code(name) for name in ordered[:LONGEST_LIST])
    rest = len(ordered) - LONGEST_LIST
    return f"{shown} and {rest} more" if rest > 0 else shown or "none"
