"""Benchmarks of many Definitions, one after the other: one that fails stops none of those behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.judging.bench.report import Report
from flashinfer_trace.judging.submission import SubmissionError
from flashinfer_trace.sandbox.limits import printable

__all__ = ["Benchmarks", "bench_all"]


@dataclass
class Benchmarks:
    """What became of each Definition.

    Attributes:
        reports: of those that were benchmarked, in their order.
        failed: names of those that could not be, and why.
        left: names of those for which no time was left.
    """

    reports: list[Report] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every Definition that had its turn could be benchmarked, and every report has passed."""
        return not self.failed and all(one.passed for one in self.reports)

    @property
    def timed(self) -> bool:
        """Whether there is a time at all."""
        return any(one.timed for one in self.reports)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"reports": [one.to_dict() for one in self.reports], "failed": self.failed, "left": self.left}


def bench_all(
    definitions: Sequence[Definition],
    measure: Callable[[Definition], Report],
    finished: Callable[[Definition, Report], None],
    *,
    budget: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Benchmarks:
    """Benchmarks Definitions in their order.

    Args:
        definitions: of which the first is always benchmarked.
        measure: benchmarks one of them.
        finished: told at once what was found, so that what comes later cannot lose it.
        budget: seconds after which no further Definition has its turn; the one that has it comes to its end.
        now: a clock, in seconds.

    Raises:
        SubmissionError: what is given is no submission, which no other Definition would change.
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
