"""How long the last whole run took, as docs/harness_power.md shows it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import JsonSourceError, load_object
from tools.mutate.results import MutateDataError

#: What the last run took that judged every mutant on one machine; committed.
TIMES = Path(__file__).with_name("times.json")

FIGURES = ("seconds", "processor_seconds", "processes", "processors", "mutants")


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._clock, self._processors = time.monotonic(), _processor_seconds()

    def figures(self, processes: int, mutants: int) -> dict[str, Any]:
        """The time spent so far, including processes that have ended.

        Args:
            processes: how many judged at once.
            mutants: how many were judged.
        """
        return {
            "seconds": round(time.monotonic() - self._clock),
            "processor_seconds": round(_processor_seconds() - self._processors),
            "processes": processes,
            "processors": os.cpu_count() or 1,
            "mutants": mutants,
            "date": datetime.now(timezone.utc).date().isoformat(),
        }


def read_times(path: Path = TIMES) -> Mapping[str, Any] | None:
    """The figures of the last whole run; None if none is recorded.

    Raises:
        MutateDataError: the file is unusable, or lacks a figure.
    """
    if not path.exists():
        return None
    fix = "remove it, or restore it from version control"
    try:
        found = load_object(path)
    except JsonSourceError as error:
        raise MutateDataError(f"{path}: {error}; {fix}") from error
    wrong = next((name for name in FIGURES if type(found.get(name)) is not int), None)
    if wrong is None and not isinstance(found.get("date"), str):
        wrong = "date"
    if wrong is not None:
        raise MutateDataError(f"{path}: {wrong}: is missing or of another kind; {fix}")
    return found


def render_times(times: Mapping[str, Any] | None) -> str:
    """The section of the document; nothing if no run is recorded."""
    if times is None:
        return ""
    return (
        f"\n## Time\n\nThe last run that judged every mutant on one machine ({times['date']}) took "
        f"{times['seconds'] / 60:.1f} minutes for {times['mutants']} mutants and {times['processor_seconds'] / 60:.0f} "
        f"minutes of processors, in {times['processes']} processes on {times['processors']} processors.\n"
    )


def _processor_seconds() -> float:
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)
