"""A sample of the committed chains that changes little when the trace does: those whose digests are the smallest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

SEED = "11"
SIZE = 200


class Sampled(NamedTuple):
    """A chain of a trace: its key in the labels, its kernel, and whether it is the kernel's first."""

    key: str
    kernel: str
    first: bool
    chain: Mapping[str, Any]


def sampled(trace: Mapping[str, Any]) -> list[Sampled]:
    """The sample of a trace, as `trace_files.load_traces` returns it."""
    return sorted(_chains(trace))[:SIZE]


def calls(chain: Mapping[str, Any]) -> list[str]:
    """The calls of a chain, as `file:line:function`."""
    return [f"{frame['file']}:{frame['line']}:{frame['function']}" for frame in chain["frames"]]


def _chains(trace: Mapping[str, Any]) -> Iterator[Sampled]:
    for kernel in trace["kernels"]:
        for number, chain in enumerate(kernel["chains"]):
            text = "|".join([SEED, kernel["name"], kernel["source"], *calls(chain)])
            yield Sampled(hashlib.sha256(text.encode()).hexdigest()[:16], kernel["name"], number == 0, chain)
