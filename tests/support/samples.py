"""Samples of the committed chains that change little when the trace does: those whose digests are the smallest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

SEED, SIZE = "11", 200
#: Of the second sample, which has no chain of the first.
SECOND_SEED, SECOND_SIZE = "22112026", 100


class Sampled(NamedTuple):
    """A chain of a trace: its key in the labels, its kernel, and whether it is the kernel's first."""

    key: str
    kernel: str
    first: bool
    chain: Mapping[str, Any]


def sampled(trace: Mapping[str, Any]) -> list[Sampled]:
    """The first sample of a trace, as `trace_files.load_traces` returns it."""
    return sorted(_chains(trace, SEED))[:SIZE]


def second_sampled(trace: Mapping[str, Any]) -> list[Sampled]:
    """The second sample: of the chains of default configurations."""
    default = {one["name"] for one in trace["configurations"] if is_default(one)}
    first = {_text(one.kernel, one.chain) for one in sampled(trace)}
    rest = [one for one in _chains(trace, SECOND_SEED) if _text(one.kernel, one.chain) not in first]
    return sorted(one for one in rest if default & set(one.chain["configurations"]))[:SECOND_SIZE]


def is_default(configuration: Mapping[str, Any]) -> bool:
    """Whether a configuration of a trace leaves everything but the number of GPUs to the release."""
    chosen = set(configuration["server"]) - {"tp_size"} or configuration["environment"] or configuration["recorded"]
    return not chosen


def calls(chain: Mapping[str, Any]) -> list[str]:
    """The calls of a chain, as `file:line:function`."""
    return [f"{frame['file']}:{frame['line']}:{frame['function']}" for frame in chain["frames"]]


def _text(*parts: Any) -> str:
    return "|".join([*parts[:-1], *calls(parts[-1])])


def _chains(trace: Mapping[str, Any], seed: str) -> Iterator[Sampled]:
    for kernel in trace["kernels"]:
        for number, chain in enumerate(kernel["chains"]):
            text = _text(seed, kernel["name"], kernel["source"], chain)
            yield Sampled(hashlib.sha256(text.encode()).hexdigest()[:16], kernel["name"], number == 0, chain)
