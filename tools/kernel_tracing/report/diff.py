"""What changed between two traces, as text that is deterministic for each pair."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

__all__ = ["NO_DIFFERENCE", "diff"]

NO_DIFFERENCE = "No difference.\n"


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """New and removed kernels, moved call sites, changed chains, and what could not be evaluated, or NO_DIFFERENCE.

    Kernels are the same if their name and source are. A call site has moved if the same function calls the kernel as
    often as before, but on other lines.
    """
    lines = _header(old, new)
    before, after = _kernels(old), _kernels(new)
    gone, added = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    lines += _section(f"New kernels ({len(added)})", [f"+ {_describe(key, after[key])}" for key in added])
    lines += _section(f"Removed kernels ({len(gone)})", [f"- {_describe(key, before[key])}" for key in gone])
    changed = []
    for key in sorted(set(before) & set(after)):
        if details := _changes(before[key], after[key]):
            changed += [f"~ {key[0]} ({key[1]})", *(f"    {detail}" for detail in details)]
    number = sum(line.startswith("~") for line in changed)
    lines += _section(f"Changed kernels ({number})", changed)
    lines += _not_evaluated(old["not_evaluated"], new["not_evaluated"])
    return "\n".join(lines) + "\n" if lines else NO_DIFFERENCE


def _header(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = [f"{what}: {old[what]} -> {new[what]}" for what in ("model", "platform") if old[what] != new[what]]
    for name in sorted({*old["sources"], *new["sources"]}):
        before, after = old["sources"].get(name), new["sources"].get(name)
        if before == after:
            continue
        versions = [source["version"] if source else "absent" for source in (before, after)]
        same = " (other content)" if versions[0] == versions[1] else ""
        lines.append(f"{name}: {versions[0]} -> {versions[1]}{same}")
    return lines


def _kernels(trace: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """(name, source) -> the kernels with them: several if the name is defined in several files."""
    kernels = defaultdict(list)
    for kernel in trace["kernels"]:
        kernels[kernel["name"], kernel["source"]].append(kernel)
    return kernels


def _describe(key: tuple[str, str], kernels: list[Mapping[str, Any]]) -> str:
    chains = sum(len(kernel["chains"]) for kernel in kernels)
    sites = sorted({_place(site) for kernel in kernels for site in kernel["call_sites"]})
    return f"{key[0]} ({key[1]}), {chains} chains, called at {', '.join(sites)}"


def _place(site: Mapping[str, Any]) -> str:
    return f"{site['file']}:{site['line']}"


def _changes(old: list[Mapping[str, Any]], new: list[Mapping[str, Any]]) -> list[str]:
    details = []
    for what in ("definition", "category"):
        before, after = (sorted(_text(kernel[what]) for kernel in kernels) for kernels in (old, new))
        if before != after:
            details.append(f"{what}: {', '.join(before)} -> {', '.join(after)}")
    ops = [{op for kernel in kernels for op in kernel["ops"]} for kernels in (old, new)]
    details += [
        f"ops: {sign} {op}" for sign, some in (("+", ops[1] - ops[0]), ("-", ops[0] - ops[1])) for op in sorted(some)
    ]
    details += _sites(old, new)
    chains = [Counter(_chain(chain) for kernel in kernels for chain in kernel["chains"]) for kernels in (old, new)]
    totals = [sum(counter.values()) for counter in chains]
    if totals[0] != totals[1]:
        details.append(f"chains: {totals[0]} -> {totals[1]}")
    if totals[0] == totals[1] and chains[0] != chains[1] and not details:
        details.append(f"chains: {(chains[1] - chains[0]).total()} of {totals[0]} changed")
    return details


def _sites(old: list[Mapping[str, Any]], new: list[Mapping[str, Any]]) -> list[str]:
    lines: list[dict[tuple[str, str], list[int]]] = [defaultdict(list), defaultdict(list)]
    for found, kernels in zip(lines, (old, new), strict=True):
        for site in (site for kernel in kernels for site in kernel["call_sites"]):
            found[site["file"], site["function"]].append(site["line"])
    details = []
    for place in sorted({*lines[0], *lines[1]}):
        before, after = (sorted(found.get(place, [])) for found in lines)
        if before == after:
            continue
        where = f"{place[0]} in {place[1]}"
        if len(before) == len(after):
            details.append(f"call site moved: {where}, line {_numbers(before)} -> {_numbers(after)}")
        elif not before:
            details.append(f"call site new: {where}, line {_numbers(after)}")
        elif not after:
            details.append(f"call site removed: {where}, line {_numbers(before)}")
        else:
            details.append(f"call sites changed: {where}, lines {_numbers(before)} -> {_numbers(after)}")
    return details


def _numbers(lines: list[int]) -> str:
    return ", ".join(map(str, lines))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return _place(value) if set(value) == {"file", "line"} else repr(sorted(value.items()))
    return " ".join(_text(item) for item in value) if isinstance(value, list) else str(value)


def _chain(chain: Mapping[str, Any]) -> str:
    """A chain, and which configurations take it."""
    return f"{_text(chain['frames'])}: {_text(chain['configurations'])}"


def _not_evaluated(old: list[Mapping[str, Any]], new: list[Mapping[str, Any]]) -> list[str]:
    before, after = ({one["text"] for one in some} for some in (old, new))
    entries = [
        f"{sign} {text}" for sign, some in (("+", after - before), ("-", before - after)) for text in sorted(some)
    ]
    return _section(f"Not evaluated: {len(old)} -> {len(new)}", entries)


def _section(title: str, entries: list[str]) -> list[str]:
    return [title, *(f"  {entry}" for entry in entries)] if entries else []
