"""Traffic: how many tokens and requests a serving engine hands to a kernel at once, from workloads/traffic.json.

Lengths are drawn from quantiles that were computed from published traces, with integers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.digests import lengths_sha256
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.json_values import members, placed, strings, whole
from flashinfer_trace.format.roots import shared

#: Most tokens of one request, most requests or tokens of one call, and most tokens in the cache of a batch of decode.
MOST_LENGTH, MOST_COUNT, MOST_TOKENS = 1 << 20, 1 << 16, 1 << 23

#: Gives the next 32 random bits.
Bits = Callable[[], int]


class TrafficError(ValueError):
    """workloads/traffic.json cannot be read, or does not say what it must. The message names the place."""


@dataclass(frozen=True)
class Batch:
    """The requests of one call.

    Attributes:
        cached: tokens of each request that are in the cache before this call.
        new: tokens of each request that this call is for; 1 in decode.
        prefix: first tokens that all requests share, of those that are cached.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]
    prefix: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request after this call."""
        return [old + new for old, new in zip(self.cached, self.new, strict=True)]


@dataclass(frozen=True)
class Profile:
    """Lengths of requests of one kind, as quantiles at equal distances from 0 to 1.

    Attributes:
        source: where they are from.
        prompts: tokens of a prompt, without the prefix.
        running: tokens of a request in decode, its new one included, without the prefix; requests count in proportion
            to the length of their answers.
        positions: where in its prompt a token of prefill is; requests count in proportion to the length of the prompt.
        prefix: first tokens that all requests share.
        lengths: the prompts of a recorded run, which are taken as they are.
        chunked: whether prompts are usually longer than a chunk of prefill.
        trace_sha256: SHA-256 of the trace that the quantiles are of; "" if they are of none.
        lengths_sha256: SHA-256 of all other fields (`flashinfer_trace.dataset.digests.lengths_sha256`).
    """

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
    """Named traffic.

    Attributes:
        name: such as ``chat-decode-64``.
        phase: ``decode`` or ``prefill``.
        count: requests of a batch of decode, or tokens of a chunk of prefill.
        profile: the lengths of its requests, where a Definition has any.
        quick: whether a short benchmark contains it.
    """

    name: str
    phase: str
    count: int
    profile: Profile | None
    quick: bool

    def batch(self, bits: Bits) -> Batch:
        """The requests of one call."""
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
        with placed("the file"):
            given, tokens, requests = members(data["profiles"]), data["tokens"], data["requests"]
        profiles = {}
        for name, entry in given.items():
            with placed(f"profiles.{name[:100]}"):
                if members(entry)["lengths_sha256"] != lengths_sha256(entry):
                    fix = "restore it, or compute it again in a checkout: python -m tools.traffic_statistics TRACE"
                    raise TrafficError(f"{path}: profiles.{name}: its lengths_sha256 is of other lengths; {fix}")
                profiles[name] = _profile(entry)
        return {
            "tokens": _entries("tokens", tokens, profiles),
            "requests": [_with_lengths(each) for each in _entries("requests", requests, profiles)],
        }
    except (JsonSourceError, TypeError) as error:
        raise TrafficError(f"{path}: {str(error)[:300]}; schema/traffic.schema.json describes it") from error


def _profile(entry: Mapping[str, Any]) -> Profile:
    """A profile as the schema has it; a TypeError says what is wrong with another one."""
    profile = Profile(**entry)
    strings([profile.source, profile.trace_sha256, profile.lengths_sha256])
    for name, least in (("prompts", 1), ("running", 1), ("positions", 0), ("lengths", 0)):
        values = [whole(value, least, MOST_LENGTH) for value in getattr(profile, name)]
        if len(values) == 1 and name != "lengths":
            raise TypeError(f"{name} is one number; two quantiles are the fewest")
    whole(profile.prefix, 0, MOST_LENGTH)
    if not isinstance(profile.chunked, bool):
        raise TypeError("chunked is neither true nor false")
    return profile


def _entries(kind: str, entries: Any, profiles: Mapping[str, Profile]) -> list[Traffic]:
    if not isinstance(entries, list):
        raise TypeError(f"{kind} is no list")
    found = []
    for place, entry in enumerate(entries):
        with placed(f"{kind}[{place}]"):
            found.append(_traffic(members(entry), profiles))
    return found


def _traffic(entry: Mapping[str, Any], profiles: Mapping[str, Profile]) -> Traffic:
    (name,) = strings([entry["name"]])
    if (phase := entry["phase"]) not in ("decode", "prefill") or not isinstance(entry.get("quick", False), bool):
        raise TypeError(f"{name[:100]}: phase is decode or prefill, and quick true or false")
    profile = None
    if "profile" in entry:
        with placed("profiles"):
            profile = profiles[entry["profile"]]
    if profile is not None and profile.lengths:
        count = len(profile.lengths) if phase == "decode" else sum(profile.lengths)
    else:
        count = entry["count"]
    return Traffic(name, phase, whole(count, 1, MOST_COUNT), profile, entry.get("quick", False))


def _with_lengths(traffic: Traffic) -> Traffic:
    """Traffic whose profile has the lengths of its phase, for no more than MOST_TOKENS together."""
    profile = traffic.profile
    if profile is None:
        raise TypeError(f"{traffic.name[:100]}: it has no profile")
    if profile.lengths:
        return traffic
    prefill = profile.positions if profile.chunked else profile.prompts
    lengths = profile.running if traffic.phase == "decode" else prefill
    if not lengths:
        raise TypeError(f"{traffic.name[:100]}: its profile has no lengths for {traffic.phase}")
    if traffic.phase == "decode":
        whole(traffic.count * (profile.prefix + max(lengths)), 0, MOST_TOKENS)
    return traffic
