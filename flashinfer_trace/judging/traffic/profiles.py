"""Traffic: how many tokens and requests a serving engine hands to a kernel at once, from workloads/traffic.json.

Lengths are drawn from quantiles that were computed from published traces, with integers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.dataset.validation.schemas import first_problem
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.roots import find_root, shared

#: Most requests or tokens of one call, and most tokens in the cache of a batch of decode.
MOST_COUNT, MOST_TOKENS = 1 << 16, 1 << 23

#: Gives the next 32 random bits.
Bits = Callable[[], int]


class TrafficError(ValueError):
    """workloads/traffic.json cannot be read, or does not say what it must. The message names the place."""


@dataclass(frozen=True)
class Batch:
    """The requests of one call: tokens of each that are in the cache before it, tokens of each that it is for (1 in
    decode), and first tokens of the cached ones that all requests share."""

    cached: tuple[int, ...]
    new: tuple[int, ...]
    prefix: int = 0

    @property
    def lengths(self) -> list[int]:
        return [old + new for old, new in zip(self.cached, self.new, strict=True)]


@dataclass(frozen=True)
class Profile:
    """Lengths of requests of one kind, as quantiles at equal distances from 0 to 1: see schema/traffic.schema.json."""

    source: str
    prompts: Sequence[int] = ()
    running: Sequence[int] = ()
    positions: Sequence[int] = ()
    prefix: int = 0
    lengths: Sequence[int] = ()
    chunked: bool = False
    trace_sha256: str = ""
    lengths_sha256: str = ""

    def decode(self, count: int, bits: Bits) -> Batch:
        """A batch of `count` requests, each with one new token."""
        if self.lengths:
            return Batch(tuple(self.lengths), (1,) * len(self.lengths))
        own = [quantile(self.running, bits()) for _ in range(count)]
        return Batch(tuple(self.prefix + length - 1 for length in own), (1,) * count, self.prefix)

    def prefill(self, count: int, bits: Bits) -> Batch:
        """Prompts of `count` tokens together, the last one cut; or one chunk of a prompt, that of a drawn token."""
        if self.lengths:
            return Batch((0,) * len(self.lengths), tuple(self.lengths))
        if self.chunked:
            position = quantile(self.positions, bits())
            return Batch((position // count * count,), (count,))
        new: list[int] = []
        while sum(new) < count:
            new.append(min(quantile(self.prompts, bits()), count - sum(new)))
        return Batch((self.prefix,) * len(new), tuple(new), self.prefix)


@dataclass(frozen=True)
class Traffic:
    """Named traffic: see schema/traffic.schema.json. The profile has the lengths of its requests, where a Definition
    has any."""

    name: str
    phase: str
    count: int
    profile: Profile | None
    quick: bool

    def batch(self, bits: Bits) -> Batch:
        assert self.profile is not None
        return (
            self.profile.decode(self.count, bits) if self.phase == "decode" else self.profile.prefill(self.count, bits)
        )


def quantile(values: Sequence[int], bits: int) -> int:
    """The value at bits / 2^32 between the first and the last quantile, linear in between, rounded down."""
    place = bits * (len(values) - 1)
    index, part = place >> 32, place & 0xFFFFFFFF
    return values[index] + ((values[index + 1] - values[index]) * part >> 32)


def load_traffic(root: Path) -> dict[str, list[Traffic]]:
    """Traffic by what a Definition tells apart: ``tokens`` (their number alone) and ``requests`` (their lengths).

    Raises:
        TrafficError: workloads/traffic.json cannot be read, or has other lengths than those that its digests are of.
    """
    path = shared(root, "workloads", "traffic.json")
    try:
        data = load_object(path)
        if problem := first_problem("traffic", data, find_root()):
            raise ValueError(problem)
        for name, entry in data["profiles"].items():
            if entry["lengths_sha256"] != lengths_sha256(entry):
                fix = "restore it, or compute it again in a checkout: python -m tools.traffic_statistics TRACE"
                raise ValueError(f"profiles.{name}: its lengths_sha256 is of other lengths; {fix}")
        profiles = {name: Profile(**entry) for name, entry in data["profiles"].items()}
        return {kind: [_traffic(kind, entry, profiles) for entry in data[kind]] for kind in ("tokens", "requests")}
    except ValueError as error:
        raise TrafficError(f"{path}: {str(error)[:500]}; schema/traffic.schema.json describes it") from error


def _traffic(kind: str, entry: Mapping[str, Any], profiles: Mapping[str, Profile]) -> Traffic:
    """An entry that follows the schema; a ValueError says what else is wrong with it."""
    name, phase, profile = entry["name"], entry["phase"], profiles.get(entry.get("profile", ""))
    if profile is None and (kind == "requests" or "profile" in entry):
        raise ValueError(f"{name[:100]}: it has no profile that exists")
    count = entry.get("count", 0)
    if profile is not None and profile.lengths:
        count = len(profile.lengths) if phase == "decode" else sum(profile.lengths)
    elif profile is not None and kind == "requests":
        prefill = profile.positions if profile.chunked else profile.prompts
        lengths = profile.running if phase == "decode" else prefill
        if not lengths:
            raise ValueError(f"{name[:100]}: its profile has no lengths for {phase}")
        if phase == "decode" and count * (profile.prefix + max(lengths)) > MOST_TOKENS:
            raise ValueError(f"{name[:100]}: {count} requests may have more than {MOST_TOKENS} tokens together")
    if not 1 <= count <= MOST_COUNT:
        raise ValueError(f"{name[:100]}: its count is {count}; it must be from 1 to {MOST_COUNT}")
    return Traffic(name, phase, count, profile, entry.get("quick", False))
