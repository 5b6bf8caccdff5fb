"""Statistics of timed calls: medians and spreads, and whether they can be believed. Needs no GPU."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: By how much calls on inputs that were seen before may be faster than first calls, as a fraction and in seconds,
#: before the first calls alone are believed.
REMEMBERED, REMEMBERED_SECONDS = 0.2, 5e-6
#: The most seconds that one call costs in addition to its work, by a clock outside of its process; and how many times
#: its work it may seem to take while it waits for a processor, not for the GPU.
OVERHEAD, PATIENCE = 8e-4, 3.0
#: How many times as long as in the judge's process a GPU may be held, because its clocks are lower.
HELD = 1.25
#: The part of the calls that must be launched ahead of the GPU for it alone to decide their time and quartiles.
IN_TIME = 0.75
#: The part of the series that is left out of their mean at each end.
TRIMMED = 0.125
GIB = 1 << 30
#: Times its inputs that a process may keep: where they are, where they were, and what its kernel makes of them.
KEPT = 4


@dataclass(frozen=True)
class Policy:
    """How a kernel is timed on one workload.

    Attributes:
        fresh: rounds, in each of which every process has one series of calls, on inputs that it has not seen.
        least: of them, whatever time they take.
        seconds: after which no further inputs are drawn.
        repeats: calls in a series.
        processes: of each kernel. Their times differ by a few per cent, partly because their data has different
            addresses in the GPU's memory.
        warm: whether the cache may hold the inputs.
        graph: whether calls are replayed as a CUDA graph.
        memory: bytes of a GPU's memory that may be used; None for all that is free.
    """

    fresh: int = 12
    least: int = 3
    seconds: float = 10.0
    repeats: int = 3
    processes: int = 4
    warm: bool = False
    graph: bool = False
    memory: int | None = None

    def budget(self, free: int) -> int:
        """Bytes that may be used of those that are free."""
        return free if self.memory is None else min(free, self.memory)

    def too_large(self, size: int) -> str:
        """Why inputs and outputs of so many bytes are not timed; empty if one process of a kernel has room for them."""
        if self.memory is None or KEPT * size <= self.memory:
            return ""
        return f"its kernels need {KEPT * size / GIB:.3g} GiB, of a budget of {self.memory / GIB:.3g}"

    def goes_on(self, done: int, seconds: float) -> bool:
        """Whether further inputs are drawn after so many, which took so long."""
        return done < self.least or (done < self.fresh and seconds < self.seconds)

    def fitting(self, size: int, free: int) -> int:
        """Processes of each kernel for which there is room: `size` are bytes of the inputs of one process of every
        kernel."""
        return max(1, min(self.processes, free // (KEPT * size))) if size else self.processes


@dataclass(frozen=True)
class Series:
    """Calls on one set of inputs in one process.

    Attributes:
        calls: as `judging.process.Timed` has them; the first one sees the inputs first.
        outside: seconds of all of them by the judge's clock.
        aside: seconds that the judge's own GPU needs to restore memory and to flush the cache once.
        held: seconds for which it is held before a call, and before run() of a kernel that plans.
    """

    calls: Sequence[Mapping[str, float]]
    outside: float
    aside: float = 0.0
    held: float = 0.0

    @property
    def disputed(self) -> bool:
        """Whether the judge's clock measured much longer for the calls than the submission's process reported."""
        said = sum(call["total"] for call in self.calls)
        held = HELD * self.held * sum(1 + ("run" in call) for call in self.calls)
        return self.outside > PATIENCE * said + held + len(self.calls) * (2 * self.aside + OVERHEAD)


@dataclass(frozen=True)
class Summary:
    """The time of a kernel on a workload, in seconds.

    Attributes:
        seconds: the mean of the medians of the series, without the highest and the lowest eighth of them; of their
            first calls alone if it `remembers`.
        low, high: quartiles of the calls.
        first, again: medians of the calls that saw inputs for the first time, and of others.
        plan, run: as `seconds`, of the phases of a kernel that has both.
        calls, inputs, processes: how many; inputs of each process.
        ahead: the part of the calls that was launched before the GPU began them. The time of others has gaps, in which
            the GPU waited for the processor.
        remembers: it is faster on inputs that it has seen before.
        disputed: it took much longer by the judge's clock.
    """

    seconds: float
    low: float
    high: float
    first: float
    again: float | None
    plan: float | None
    run: float | None
    calls: int
    inputs: int
    processes: int
    ahead: float
    remembers: bool
    disputed: bool

    @property
    def spread(self) -> float:
        """The distance of the quartiles, as a fraction of the time."""
        return (self.high - self.low) / self.seconds

    @property
    def waited(self) -> bool:
        """Whether the processor has a part in the time, because the GPU waited for it in many calls."""
        return self.ahead < IN_TIME

    @property
    def served(self) -> float:
        """The time that counts in a comparison: of a kernel that plans once for many layers, that of run()."""
        return self.seconds if self.run is None else self.run


def summary(series: Sequence[Series], processes: int = 1) -> Summary:
    """Combines series of calls. There must be at least one, and equally many of each process."""
    first = [each.calls[0]["total"] for each in series]
    again = [call["total"] for each in series for call in each.calls[1:]]
    saved = statistics.median(first) - statistics.median(again) if again else 0.0
    remembers = bool(again) and saved > max(REMEMBERED_SECONDS, REMEMBERED * statistics.median(again))
    believed = first if remembers else [*first, *again]
    low, _, high = statistics.quantiles(believed, n=4, method="inclusive") if len(believed) > 1 else believed * 3
    calls = [call for each in series for call in each.calls]
    counted = [each.calls[:1] if remembers else each.calls for each in series]
    return Summary(
        seconds=_mean(counted, "total"),
        low=low,
        high=high,
        first=statistics.median(first),
        again=statistics.median(again) if again else None,
        plan=_phase(series, "plan"),
        run=_phase(series, "run"),
        calls=len(calls),
        inputs=len(series) // processes,
        processes=processes,
        ahead=statistics.fmean(call["ahead"] for call in calls),
        remembers=remembers,
        disputed=sum(each.disputed for each in series) > len(series) / 2,
    )


def _mean(series: Iterable[Sequence[Mapping[str, float]]], name: str) -> float:
    """The trimmed mean of the medians of series of calls.

    A median of all calls would jump where a kernel has two speeds, each of which is that of some processes.
    """
    medians = sorted(statistics.median(call[name] for call in calls) for calls in series)
    left_out = int(TRIMMED * len(medians))
    return statistics.fmean(medians[left_out : len(medians) - left_out])


def _phase(series: Sequence[Series], name: str) -> float | None:
    calls = [each.calls for each in series]
    return _mean(calls, name) if all(name in call for each in calls for call in each) else None
