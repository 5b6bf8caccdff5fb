"""Gives thousands of hostile files to commands that read such files: docs/hostile_files.md says which got which. None
may end with a traceback, take more than 5 seconds or 500 MB, or print a line that nobody can read.

    python -m tools.fuzz                               # 20,000 Definitions and references, 1,780 other files
    python -m tools.fuzz --group others                # one group only
    python -m tools.fuzz --files 500 --seed 7          # fewer files, or other ones; writes nothing
    python -m tools.fuzz --seed 0 --replay others:17   # one file again: what it is, and what each command says

A whole run with seed 0, of both groups or of one, writes its figures into tools/fuzz/results.json, which
`python -m tools.site` renders as docs/hostile_files.md. Exit status: 0 nothing was found, 1 something was,
2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track

from flashinfer_trace.format.files import write_json
from tools.fuzz.run import MEGABYTES, SECONDS, Case, Outcome, kind_of, run_case, start_worker
from tools.fuzz.sandbox import KINDS
from tools.fuzz.summary import RESULTS, merged, summarize
from tools.shared.command import end_with
from tools.shared.limited_pool import Ended, default_processes, outcomes

FILES, OTHERS, SEED = 20_000, 1_600, 0
#: How many files of each group a whole run has.
WHOLE = {"definitions": FILES, "others": OTHERS}
#: Seconds of the clock for all commands of one file; a loaded machine is slow, so the limit of each is measured apart.
PATIENCE = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=FILES, metavar="N", help="Definitions, references [%(default)s]")
    parser.add_argument("--others", type=int, metavar="N", help=f"other files [{OTHERS}, or a tenth of --files]")
    parser.add_argument("--group", choices=KINDS, help="only the files of this group")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="which files [%(default)s]")
    parser.add_argument("--replay", metavar="GROUP:N", help="only this file of the seed, in this process")
    parser.add_argument("--processes", type=int, default=default_processes(), metavar="N", help="[%(default)s]")
    options = parser.parse_args(arguments)
    if options.replay:
        group, _, number = options.replay.partition(":")
        if group not in KINDS or not number.isdecimal():
            parser.error(f"--replay takes one of {', '.join(KINDS)}, a colon and a number")
        return replay(Case(group, options.seed, int(number)))
    others = options.files * OTHERS // FILES if options.others is None else options.others
    counts = {"definitions": options.files, "others": others}
    counts = {group: count for group, count in counts.items() if options.group in (None, group)}
    cases = [Case(group, options.seed, number) for group, count in counts.items() for number in range(count)]
    found = run(cases, options.processes)
    whole = options.seed == SEED and counts.items() <= WHOLE.items()
    return report(options.seed, list(zip(cases, found, strict=True)), whole)


def run(cases: Sequence[Case], processes: int) -> list[Outcome]:
    """The outcome of each case, in processes with limits. Prints each finding at once."""
    console = Console(stderr=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as directory:
        found = outcomes(
            run_case,
            [(case,) for case in cases],
            processes=processes,
            seconds=PATIENCE,
            start=start_worker,
            started_with=[directory],
        )
        quiet = not console.is_terminal
        shown = track(found, "files", total=len(cases), console=console, disable=quiet, transient=True)
        for case, one in zip(cases, shown, strict=True):
            outcome = ended(case, one) if isinstance(one, Ended) else one
            for finding in outcome.findings:
                print(f"{outcome.kind} ({outcome.change}): {finding}\n    {case.replay}", file=sys.stderr, flush=True)
            results.append(outcome)
    return results


def ended(case: Case, how: Ended) -> Outcome:
    return Outcome(kind_of(case).name, "unknown", findings=[f"all commands: {how.detail}"])


def report(seed: int, found: Sequence[tuple[Case, Outcome]], whole: bool) -> int:
    """Prints the figures, and writes them down after a whole run: those of a group that was not run are kept."""
    summary = summarize(seed, found)
    for kind, row in summary["kinds"].items():
        print(f"{kind}: " + ", ".join(f"{number} {name}" for name, number in row.items()))
    slowest = max((outcome.seconds for _, outcome in found), default=0.0)
    largest = max((outcome.megabytes for _, outcome in found), default=0.0)
    print(f"slowest command: {slowest:.2f} s of {SECONDS:g}; most memory: {largest:.0f} MB of {MEGABYTES}")
    if whole:
        write_json(RESULTS, merged(summary))
    return 1 if any(outcome.findings for _, outcome in found) else 0


def replay(case: Case) -> int:
    """Runs one case here and says everything about it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        start_worker(directory, limited=False)
        outcome = run_case(case)
    print(outcome)
    return 1 if outcome.findings else 0


if __name__ == "__main__":
    end_with(main)
