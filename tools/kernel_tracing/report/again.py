"""Whether the sources still give a trace: its configurations, evaluated again.

This judges what single frames cannot show: which configurations take a chain, in which phases, the op that it does,
what stays undecided, and whether a chain is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.kernel_tracing.configuration.listed import configurations
from tools.kernel_tracing.configuration.requested import ConfigurationError
from tools.kernel_tracing.report.evaluation import evaluate_all
from tools.kernel_tracing.report.merge import merged
from tools.kernel_tracing.report.trace_files import completed
from tools.kernel_tracing.source.sources import find_sources

_FIELDS = ("op", "group", "configurations", "undecided")


def differences(trace: Mapping[str, Any], sources: Path, listed: Path, jobs: int = 1) -> list[str]:
    """What an evaluation of the trace's configurations finds to be different, one line each.

    Args:
        trace: a document, as `trace_files.load_traces` returns it.
        sources: the directory of the sources.
        listed: the list of configurations.

    Raises:
        ConfigurationError: the list lacks a configuration of the trace.
    """
    known = configurations(listed)
    names = [one["name"] for one in trace["configurations"]]
    if missing := [name for name in names if name not in known]:
        raise ConfigurationError(f"{listed}: has no {missing[0]}, which the trace has; trace again")
    evaluations = evaluate_all([known[name] for name in names], sources, jobs)
    again = completed(merged(evaluations, find_sources(sources), trace["platform"], trace["model"]))
    return list(compared(trace, again))


def compared(trace: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """The differences between two documents of the same configurations, but for what was seen."""
    for old, new in zip(trace["configurations"], again["configurations"], strict=True):
        for field in sorted({*old, *new}):
            if old.get(field) != new.get(field):
                yield f"configuration {old['name']}: {field} is {old.get(field)!r}, the sources give {new.get(field)!r}"
    before, after = _kernels(trace), _kernels(again)
    for key in sorted(before.keys() | after.keys()):
        if key not in after:
            yield f"{key[0]} ({key[1]}): no configuration calls it"
        elif key not in before:
            yield f"{key[0]} ({key[1]}): is missing"
        else:
            yield from (f"{key[0]} ({key[1]}): {text}" for text in _chains(before[key], after[key]))
    if trace["not_evaluated"] != again["not_evaluated"]:
        yield "not_evaluated: the sources give another list"


def _kernels(trace: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {
        (kernel["name"], kernel["source"], kernel["definition"]["file"], kernel["definition"]["line"]): kernel
        for kernel in trace["kernels"]
    }


def _chains(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    if before["category"] != after["category"]:
        yield f"the category is {before['category']}, not {after['category']}"
    old, new = ({_key(chain): chain for chain in kernel["chains"]} for kernel in (before, after))
    for key in [*old, *(key for key in new if key not in old)]:
        place = f"chain of {len(key)} frames from {key[0][0]}:{key[0][1]}"
        if key not in new:
            yield f"{place}: no configuration takes it"
        elif key not in old:
            yield f"{place}: is missing"
        else:
            for field in _FIELDS:
                if old[key][field] != new[key][field]:
                    yield f"{place}: {field} is {old[key][field]!r}, the sources give {new[key][field]!r}"[:400]
    if list(old) != list(new) and set(old) == set(new):
        yield "the chains are in another order"


def _key(chain: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((frame["file"], frame["line"], frame["function"], frame["call"]) for frame in chain["frames"])
