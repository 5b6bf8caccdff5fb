"""Measures what it costs to run references in processes of their own: `flashinfer-trace verify` with them and without.

    python -m benchmarks.isolation                     # one Definition of each family, five pairs of runs
    python -m benchmarks.isolation 'rmsnorm*' -n 10    # other Definitions, more pairs

Both kinds of run alternate, so that a change of the machine's load affects both. The figures are seconds of processors
(user and system, all processes of a run together) and of the clock; the ratios are taken pair by pair.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flashinfer_trace import definitions

#: Runs the command line in one process: references run beside the oracle, as they do on a GPU.
INSIDE = """
import contextlib, sys
from flashinfer_trace.sandbox import worker
worker.reference_worker = lambda device, full: contextlib.nullcontext()
from flashinfer_trace.cli import main
main(sys.argv[1:])
"""
CONFINED = "import sys\nfrom flashinfer_trace.cli import main\nmain(sys.argv[1:])\n"


@dataclass(frozen=True)
class Cost:
    """Seconds of one run: of processors, and of the clock."""

    processors: float
    clock: float


def cost(code: str, arguments: Sequence[str]) -> Cost:
    """Runs a program with these arguments.

    Raises:
        RuntimeError: the run failed: there is nothing to measure.
    """
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"what is measured ended with exit status {process.returncode}")
    return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - started)


def one_of_each_family() -> list[str]:
    """The first Definition of each family, by name."""
    from flashinfer_trace.families import family_of

    chosen: dict[str, str] = {}
    for definition in definitions():
        chosen.setdefault(family_of(definition).name, definition.name)
    return list(chosen.values())


def pairs(names: Sequence[str], count: int) -> list[tuple[Cost, Cost]]:
    """What `verify` of these Definitions against their oracles costs, with worker processes and without, in turn.

    Raises:
        RuntimeError: a run failed.
    """
    for code in (CONFINED, INSIDE):  # a warm-up: files and bytecode are read from memory afterwards
        cost(code, ["verify", *names[:1]])
    return [(cost(CONFINED, ["verify", *names]), cost(INSIDE, ["verify", *names])) for _ in range(count)]


def ratio(runs: Sequence[tuple[Cost, Cost]], figure: str) -> float:
    """The median over the pairs of what the first costs in terms of the second; `figure`: an attribute of `Cost`."""
    return statistics.median(getattr(confined, figure) / getattr(inside, figure) for confined, inside in runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Definitions or globs [one of each family]")
    parser.add_argument("-n", type=int, default=5, metavar="PAIRS", dest="pairs", help="pairs of runs [%(default)s]")
    options = parser.parse_args(arguments)
    names = options.names or one_of_each_family()
    runs = pairs(names, options.pairs)
    for figure in ("processors", "clock"):
        confined, inside = ([getattr(one, figure) for one in column] for column in zip(*runs, strict=True))
        print(f"seconds of {'processors' if figure == 'processors' else 'the clock'}, {len(names)} arguments")
        for label, values in (("  own process", confined), ("  same process", inside)):
            print(f"{label:15} min {min(values):7.2f}   median {statistics.median(values):7.2f}")
        least, middle = min(confined) / min(inside), ratio(runs, figure)
        print(f"  overhead      of the minima {least - 1:+.1%}   median of the pairs {middle - 1:+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
