"""The results of a benchmark, as text, as JSON, and as the lines of results/."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.judging.bench.environment import Clocks, Environment
from flashinfer_trace.judging.bench.statistics import Summary
from flashinfer_trace.judging.costs.work import microseconds
from flashinfer_trace.judging.submission import SubmissionError
from flashinfer_trace.judging.verdict import Failure, Verdict
from flashinfer_trace.sandbox.limits import printable


@dataclass(frozen=True)
class Measured:
    """One kernel (a submission by its file, without library and version) on one workload; what failed is not timed."""

    kernel: str
    library: str = ""
    version: str = ""
    summary: Summary | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class Timetable:
    """One workload.

    Attributes:
        bytes, operations: what has to be moved and computed.
        least: seconds that the GPU needs for that, by its figures in schema/gpus.json; None of a GPU without them.
        kernels: the submissions first, if there are any.
        clocks: of the GPU, the worst of the readings after each round of series; or why they are not known.
        skipped: why nothing was timed; empty otherwise.
    """

    workload: str
    axes: Mapping[str, int]
    seed: int
    bytes: int = 0
    operations: Mapping[str, int] = field(default_factory=dict)
    least: float | None = None
    kernels: Sequence[Measured] = ()
    clocks: Clocks | str = ""
    skipped: str = ""

    @property
    def best(self) -> Measured | None:
        """The fastest real kernel."""
        real = [(one.summary.served, one) for one in self.kernels if one.library and one.summary is not None]
        return min(real, key=lambda pair: pair[0])[1] if real else None

    def fraction(self, one: Measured) -> float | None:
        """The least time over that of a kernel."""
        return self.least / one.summary.served if self.least is not None and one.summary is not None else None

    def ratio(self, one: Measured) -> float | None:
        """The time of the fastest real kernel over that of a kernel: above 1 it is faster."""
        best = self.best
        if best is None or best.summary is None or one.summary is None:
            return None
        return best.summary.served / one.summary.served


@dataclass
class Report:
    """A benchmark.

    Attributes:
        verdicts: on the submissions; none if only real kernels were timed. One that is wrong is not timed.
        warm, graph: how (see `statistics.Policy`).
        left_out: real kernels that cannot run here, and why.
        seconds: how long all took.
    """

    definition: str
    verdicts: Sequence[Verdict]
    environment: Environment
    warm: bool
    graph: bool
    timetables: list[Timetable] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the submissions are right, and so was every output that was timed."""
        return all(one.passed for one in self.verdicts) and not any(
            one.failure is not None for each in self.timetables for one in each.kernels if not one.library
        )

    @property
    def timed(self) -> bool:
        """Whether there is a time at all."""
        return any(one.summary is not None for each in self.timetables for one in each.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        found = {**dataclasses.asdict(replace(self, verdicts=[])), "passed": self.passed}
        found["verdicts"] = [one.to_dict() for one in self.verdicts]
        for each, entry in zip(self.timetables, found["timetables"], strict=True):
            entry["best"] = each.best.kernel if each.best else None
            for one, figures in zip(each.kernels, entry["kernels"], strict=True):
                figures |= {"roofline": each.fraction(one), "ratio": each.ratio(one)}
                figures["unbelievable"] = self.unbelievable(each, one)
        return found

    def unbelievable(self, each: Timetable, one: Measured) -> bool:
        """Whether a kernel took less than the GPU needs at least, although the cache had been emptied."""
        return not self.warm and (each.fraction(one) or 0.0) > 1.0

    def rows(self) -> list[list[str]]:
        """The table for people, headings first."""
        rows = [["workload", "kernel", "time", "quartiles", "roofline", "best/time", "remarks"]]
        for each in self.timetables:
            if each.skipped:
                rows.append([each.workload, "-", "-", "-", "-", "-", each.skipped])
            rows += [_row(each, one, self.unbelievable(each, one)) for one in each.kernels]
        return rows


def _row(each: Timetable, one: Measured, unbelievable: bool) -> list[str]:
    found = one.summary
    if found is None:
        why = one.failure.message if one.failure else "not timed"
        return [each.workload, one.kernel, "-", "-", "-", "-", why]
    fraction, ratio = each.fraction(one), each.ratio(one)
    remarks = []
    if found.plan is not None and found.run is not None:
        plan, run, both = map(microseconds, (found.plan, found.run, found.seconds))
        remarks.append(f"plan {plan}, run {run}, together {both}")
    if found.remembers:
        remarks.append(f"faster on inputs that it saw before, {microseconds(found.again or 0)}; first calls count")
    if found.waited:
        remarks.append("the GPU waited for the processor")
    if found.disputed:
        remarks.append("took much longer by the judge's clock")
    if unbelievable:
        remarks.append("not believable: less than the GPU needs at least")
    if one.failure is not None:
        remarks.append(one.failure.message)
    time, low, high = map(microseconds, (found.served, found.low, found.high))
    return [
        *(each.workload, one.kernel, time, f"{low} - {high}"),
        *("-" if fraction is None else f"{100 * fraction:.0f} %", "-" if ratio is None else f"{ratio:.2f}"),
        "; ".join(remarks),
    ]


@dataclass
class Benchmarks:
    """The report of each Definition; names of those that could not be benchmarked, and why; and those without time
    left."""

    reports: list[Report] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every Definition that had its turn could be benchmarked, and every report has passed."""
        return not self.failed and all(one.passed for one in self.reports)

    @property
    def timed(self) -> bool:
        return any(one.timed for one in self.reports)

    def to_dict(self) -> dict[str, Any]:
        return {"reports": [one.to_dict() for one in self.reports], "failed": self.failed, "left": self.left}


def bench_all(
    definitions: Sequence[Definition],
    measure: Callable[[Definition], Report],
    finished: Callable[[Definition, Report], None],
    *,
    budget: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Benchmarks:
    """Benchmarks Definitions in their order, the first in any case.

    Args:
        finished: called with each result at once; a later failure cannot lose it.
        budget: seconds after which no further Definition has its turn; the one that has it comes to its end.

    Raises:
        SubmissionError: the argument is not a submission; other Definitions would not change that.
        Exception: of `measure`, if there is one Definition; and of `finished`.
    """
    found, started = Benchmarks(), now()
    for number, definition in enumerate(definitions):
        if number and budget is not None and now() - started >= budget:
            found.left = [one.name for one in definitions[number:]]
            break
        try:
            report = measure(definition)
        except SubmissionError:
            raise
        except Exception as error:  # of any library, or of CUDA
            if len(definitions) == 1:
                raise
            found.failed[definition.name] = printable(f"{type(error).__name__}: {error}")
            continue
        found.reports.append(report)
        finished(definition, report)
    return found
