"""A dry run against the recorded run that it repeats: kernels, Python chains, PyTorch's functions, and arguments."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.runtime_tracing.recording import DRIVERS, PREPARING, RecordedCall, Recording

#: Why a dry run may differ: patterns of run, side and place, each with its reason.
EXPLAINED = Path(__file__).with_name("differences.json")
#: The parts of a chain that are compared.
Chain = tuple[str, str, str, tuple[tuple[str, int, str], ...]]


@dataclass(frozen=True)
class Difference:
    """A chain that only one of the two runs has.

    Attributes:
        side: "recorded" or "dry".
        chain: phase, library, kernel, and the frames, the call site first.
        reason: why it is explained; "" if it is not.
    """

    side: str
    chain: Chain
    reason: str

    @property
    def place(self) -> str:
        """Phase, kernel and the innermost call sites."""
        phase, library, kernel, stack = self.chain
        sites = " < ".join(f"{file}:{line}:{function}" for file, line, function in stack[:3])
        return f"{phase} {library} {kernel} at {sites}"


@dataclass(frozen=True)
class Comparison:
    """How a dry run compares.

    Attributes:
        name: of the run.
        equal: how many chains both have; of those, `torch` are of PyTorch's functions.
        arguments: how many of them have the same arguments.
        differences: the others.
    """

    name: str
    equal: int
    torch: int
    arguments: int
    differences: tuple[Difference, ...]

    @property
    def unexplained(self) -> tuple[Difference, ...]:
        """Those that no reason is known for."""
        return tuple(one for one in self.differences if not one.reason)


def compare(recorded: Recording, calls: Sequence[RecordedCall]) -> Comparison:
    """Compares the calls of a dry run with those of the recorded run. Calls that only plan on the host are left out."""
    truth, dry = _chains(recorded.calls), _chains(calls)
    both = truth.keys() & dry.keys()
    reasons: list[Mapping[str, str]] = json.loads(EXPLAINED.read_text(encoding="utf-8"))
    found = [
        _explained(recorded.name, side, chain, reasons)
        for side, here, there in (("recorded", truth, dry), ("dry", dry, truth))
        for chain in here
        if chain not in there
    ]
    same = sum(truth[chain] == dry[chain] for chain in both)
    return Comparison(recorded.name, len(both), sum(one[1] == "torch" for one in both), same, tuple(found))


def _chains(calls: Iterable[RecordedCall]) -> dict[Chain, Counter[str]]:
    found: dict[Chain, Counter[str]] = {}
    for call in calls:
        if call.kernel and call.kernel.rpartition(".")[2] not in PREPARING:
            stack = tuple((one.file, one.line, one.function) for one in call.stack if one.file not in DRIVERS)
            chain = (call.phase, call.library, call.kernel, stack)
            found.setdefault(chain, Counter())[call.arguments] += call.count
    return found


def _explained(name: str, side: str, chain: Chain, reasons: Sequence[Mapping[str, str]]) -> Difference:
    found = Difference(side, chain, "")
    for one in reasons:
        if all(
            fnmatch.fnmatchcase(value, one.get(key, "*"))
            for key, value in (("run", name), ("side", side), ("place", found.place))
        ):
            return Difference(side, chain, one["why"])
    return found


def report(comparison: Comparison) -> list[str]:
    """Lines for a reader: the figures, and every difference with its reason."""
    one = comparison
    head = f"{one.name}: {one.equal} chains equal ({one.torch} of PyTorch, {one.arguments} with equal arguments)"
    explained = len(one.differences) - len(one.unexplained)
    lines = [f"{head}, {explained} explained, {len(one.unexplained)} not"]
    return lines + [
        f"    only {found.side}: {found.place}: {found.reason or 'NOT EXPLAINED'}" for found in one.differences
    ]


def changes(before: Recording, after: Recording) -> list[str]:
    """Differences between the calls of two runs of a configuration, a line each: kernels, and within a release anything
    else."""
    found = []
    counts = [
        Counter((one.phase, one.library, one.kernel) for one in run.calls if one.kernel) for run in (before, after)
    ]
    for sign, fewer, more in (("-", counts[1], counts[0]), ("+", counts[0], counts[1])):
        found += [f"    {sign} {' '.join(key)}" for key in more if key not in fewer]
    releases = {run.document["versions"]["sglang"] for run in (before, after)}
    if not found and len(releases) == 1 and before.document["sha256"] != after.document["sha256"]:
        found = ["    the same kernels, from other places or with other arguments"]
    return found
