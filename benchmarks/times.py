"""Measures how long the long runs of this project take, and what the worker processes of references cost of one.

    python -m benchmarks.times              # all: half an hour on 2 cores
    python -m benchmarks.times dataset      # `flashinfer-trace verify` of the whole dataset
    python -m benchmarks.times sample       # the sample of mutants that CI judges
    python -m benchmarks.times overhead     # python -m benchmarks.isolation

What is measured is written into benchmarks/times.json, which `python -m tools.site` renders in
docs/safeguards.md; what is not measured stays as it was. Run it on an idle machine: others on it make the times longer.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import isolation
from flashinfer_trace.format.files import write_json
from flashinfer_trace.format.json_source import JsonSourceError, load_object

__all__ = ["MEASURED", "MEASURED_ON_GPUS", "TimesError", "read_gpu_times", "read_times"]

#: What was measured; committed. That of GPUs is written by `pytest -m gpu --record-times FILE`.
MEASURED, MEASURED_ON_GPUS = Path("benchmarks/times.json"), Path("benchmarks/gpu_times.json")
VERIFY = "from flashinfer_trace.cli import main; main(['verify'])"
SAMPLE = "import sys, pytest; sys.exit(pytest.main(['-q', '-n', 'auto', 'tests/mutate/test_sample.py']))"
#: What is timed by the clock -> its program.
PROGRAMS = {"dataset": VERIFY, "sample": SAMPLE}
#: Pairs of runs with and without worker processes.
PAIRS = 5


class TimesError(ValueError):
    """The measured times cannot be used. The message names the file and the fix."""


def read_times(root: Path) -> Mapping[str, Mapping[str, Any]]:
    """What was measured: name -> its figures; nothing if nothing was yet.

    Raises:
        TimesError: the file is unusable, or a figure is missing.
    """
    path = root / MEASURED
    if not path.exists():
        return {}
    fix = "measure again: python -m benchmarks.times"
    try:
        found = load_object(path)
        for name, figures in found.items():
            needed = ("overhead",) if name == "overhead" else ("seconds", "processor_seconds")
            _ = figures["date"], [float(figures[key]) for key in (*needed, "processors")]
    except (JsonSourceError, KeyError, TypeError, ValueError) as error:
        raise TimesError(f"{path}: unusable ({error}); {fix}") from error
    return found


def read_gpu_times(path: Path) -> list[Mapping[str, Any]]:
    """The runs of a file that `pytest -m gpu --record-times` wrote; none if there is no file.

    Raises:
        TimesError: the file is unusable, or a figure is missing.
    """
    if not path.exists():
        return []
    try:
        runs: list[Mapping[str, Any]] = load_object(path)["runs"]
        for run in runs:
            _ = run["gpu"], run["date"], float(run["seconds"])
            _ = [int(run[key]) for key in ("gpus", "definitions", "passed", "failed")]
    except (JsonSourceError, KeyError, TypeError, ValueError) as error:
        raise TimesError(f"{path}: unusable ({error}); remove it, and measure again") from error
    return runs


def measure(name: str) -> dict[str, Any]:
    """The figures of one of PROGRAMS, or of ``overhead``: the median of the pairs, in seconds of processors.

    Raises:
        RuntimeError: the run failed.
    """
    if name == "overhead":
        names = isolation.one_of_each_family()
        return {"overhead": round(isolation.ratio(isolation.pairs(names, PAIRS), "processors") - 1, 4), **_where()}
    cost = isolation.cost(PROGRAMS[name], ())
    return {"seconds": round(cost.clock, 1), "processor_seconds": round(cost.processors, 1), **_where()}


def _where() -> dict[str, Any]:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processors": count, "date": datetime.now(timezone.utc).date().isoformat()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    choices = [*PROGRAMS, "overhead"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(choices)} [all]")
    names = parser.parse_args(arguments).names or choices
    unknown = [name for name in names if name not in choices]
    if unknown:
        parser.error(f"{unknown[0]}: choose from {', '.join(choices)}")
    for name in names:
        found = measure(name)
        print(name, found, flush=True)
        write_json(MEASURED, {**read_times(Path()), name: found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
