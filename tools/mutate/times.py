"""How long the last whole run took, as docs/harness_power.md shows it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.mutate.results import misfit, read_checked

#: Times of the last run that judged every mutant on one machine; committed.
TIMES = Path(__file__).with_name("times.json")

FIGURES = {"seconds": int, "processor_seconds": int, "processes": int, "processors": int, "mutants": int, "date": str}


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._clock, self._processors = time.monotonic(), _processor_seconds()

    def figures(self, processes: int, mutants: int) -> dict[str, Any]:
        """The time spent so far, including processes that have ended."""
        return {
            "seconds": round(time.monotonic() - self._clock),
            "processor_seconds": round(_processor_seconds() - self._processors),
            "processes": processes,
            "processors": os.cpu_count() or 1,
            "mutants": mutants,
            "date": datetime.now(timezone.utc).date().isoformat(),
        }


def read_times(path: Path = TIMES) -> Mapping[str, Any]:
    """The figures of the last whole run."""
    fix = "run `python -m tools.mutate`, or restore it from version control"
    return read_checked(path, fix, lambda found: misfit(found, FIGURES))


def render_times(times: Mapping[str, Any]) -> str:
    """The section of the document."""
    return (
        f"\n## Time\n\nThe last run that judged every mutant on one machine ({times['date']}) took "
        f"{times['seconds'] / 60:.1f} minutes for {times['mutants']} mutants and {times['processor_seconds'] / 60:.0f} "
        f"minutes of processors, in {times['processes']} processes on {times['processors']} processors.\n"
    )


def _processor_seconds() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)
