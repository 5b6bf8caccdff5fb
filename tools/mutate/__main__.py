"""Measures the harness: changes every reference in thousands of small ways and counts the changes that it rejects.

    python -m tools.mutate                    # all families; writes tools/mutate/results.json
    python -m tools.mutate rmsnorm gemm       # these families; keeps the results of the others
    python -m tools.mutate --cluster auto     # on a Ray cluster, whose machines have this checkout
    python -m tools.mutate --check            # exit 1 if the results are older than references or operators

Verdicts are kept in .mutate/: a run that was stopped goes on where it ended, and judges again what a change of the
reference, the harness or the family's records concerns.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from flashinfer_trace import definitions
from flashinfer_trace.cli.options import missing_packages
from flashinfer_trace.dataset.evidence import RECORDED_ON
from flashinfer_trace.families import FamilyError, family_of
from flashinfer_trace.format.files import UnreadableFile, write_json
from flashinfer_trace.harness.family import Family
from tools.mutate.campaign import Judging, run_campaign
from tools.mutate.cases import known_families, representative
from tools.mutate.kernel_power import load_power, render_power
from tools.mutate.mutants import Mutant, mutants
from tools.mutate.reasons import EQUIVALENTS, KEPT, Reason, ReasonError, read_reasons, unmatched
from tools.mutate.results import MutateDataError, read_summaries
from tools.mutate.runner import judge_all
from tools.mutate.summary import RESULTS, below_floor, mutants_digest, overall, render, score
from tools.mutate.times import TIMES, Stopwatch, read_times, render_times
from tools.shared.command import end_with
from tools.shared.family_records import usable_families
from tools.shared.limited_pool import default_processes

FIX = "run `python -m tools.mutate`"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to measure [all]")
    parser.add_argument("--processes", type=int, default=default_processes(), help="how many at once [%(default)s]")
    parser.add_argument("--cluster", metavar="ADDRESS", help="judge on a Ray cluster instead: auto, local or HOST:PORT")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the results are out of date")
    options = parser.parse_args(arguments)
    try:
        known = usable_families(options.families)
    except FamilyError as error:
        return report([f"error: {error}"])
    for name in options.families:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            parser.error(f"no family {name}" + (f"; did you mean {close[0]}?" if close else ""))
    try:
        equivalents, kept = read_reasons(EQUIVALENTS), read_reasons(KEPT)
    except ReasonError as error:
        parser.error(str(error))
    try:
        if options.check:
            return report(out_of_date())
        processes = None if options.cluster else options.processes
        return measure(options.families, judging(options), equivalents, kept, processes)
    except click.ClickException as error:
        return report([f"error: {error.format_message()}"])
    except (MutateDataError, UnreadableFile) as error:
        return report([f"error: {error}"])


def judging(options: argparse.Namespace) -> Judging:
    """Where mutants are judged."""
    if options.cluster is None:
        return partial(judge_all, processes=options.processes)
    with missing_packages("cluster"):
        from tools.mutate.cluster import judge_on_cluster
    return partial(judge_on_cluster, address=options.cluster)


def measure(
    names: list[str], judging: Judging, equivalents: list[Reason], kept: list[Reason], processes: int | None = None
) -> int:
    """Runs, prints, and writes results; families that did not run keep their results.

    A run that judged every mutant on this machine, in so many processes, also writes down how long it took.
    """
    watch = Stopwatch()
    families = {name: family for name, family in known_families().items() if not names or name in names}
    campaign = run_campaign(families, equivalents, judging)
    problems = campaign.problems
    explained = {content for entry in kept for content in entry.mutants}
    for name, summary in campaign.summaries.items():
        print(f"{name}: {score(summary):.2%} of {summary['mutants']}, {summary['counts']}")
        for survivor in summary["survivors"]:
            if survivor["content"] not in explained:
                problems.append(
                    f"{survivor['id']} ({survivor['content']}) survives: {survivor['before']}  ->  {survivor['after']}"
                )
    print(f"all: {score(overall(campaign.summaries)):.2%} of {overall(campaign.summaries)['mutants']}")
    if not names:
        problems += wrong_reasons(campaign.mutants, campaign.summaries, equivalents, kept)
    committed = read_summaries(RESULTS) if names else {}
    merged = {**committed, **campaign.summaries}
    summaries = {name: merged[name] for name in known_families() if name in merged}
    write_json(RESULTS, summaries)
    if processes and not names and campaign.judged == len(campaign.mutants):
        write_json(TIMES, watch.figures(processes, campaign.judged))
    return report(problems + below_floor(summaries))


def wrong_reasons(
    found: list[Any], summaries: dict[str, Any], equivalents: list[Reason], kept: list[Reason]
) -> list[str]:
    """Reasons that no mutant has, and reasons to keep survivors that are none."""
    lines = [f"{EQUIVALENTS.name}: {content} is not a mutant; remove it" for content in unmatched(equivalents, found)]
    explained = {content for entry in kept for content in entry.mutants}
    surviving = {survivor["content"] for summary in summaries.values() for survivor in summary["survivors"]}
    return lines + [f"{KEPT.name}: {content} does not survive; remove it" for content in sorted(explained - surviving)]


def out_of_date() -> list[str]:
    """Why the committed results are older than the references or the operators."""
    summaries = read_summaries(RESULTS)
    document(summaries, read_reasons(KEPT))  # raises if another recorded file cannot be used
    families = known_families()
    lines = other_families(families, summaries)
    for name in sorted(families.keys() & summaries.keys()):
        lines += other_mutants(name, mutants(representative(families[name]), families[name]), summaries)
    return lines


def other_families(families: Mapping[str, Family], summaries: Mapping[str, Any]) -> list[str]:
    """A line for each family without results, and for results without a family."""
    lines = [f"{name}: has no results; {FIX}" for name in sorted(families.keys() - summaries.keys())]
    return lines + [f"{name}: has results but no record; {FIX}" for name in sorted(summaries.keys() - families.keys())]


def other_mutants(name: str, found: Sequence[Mutant], summaries: Mapping[str, Any]) -> list[str]:
    """A line if the results of a family are for other mutants than these."""
    same = mutants_digest(found) == summaries[name]["digest"]
    return [] if same else [f"{name}: the results are for other mutants; {FIX}"]


def document(summaries: dict[str, Any], kept: list[Reason]) -> str:
    """The text of docs/harness_power.md."""
    families, records = known_families(), load_power()
    unseen = {
        name: {fault: family.why_unseen(fault) for record in records for fault in record["faults"]}
        for name, family in families.items()
    }
    return render(summaries, kept) + render_times(read_times(TIMES)) + render_power(records, unseen, recordable())


def recordable() -> set[tuple[str, str]]:
    """Family and label of each kernel that computes a Definition on the GPUs of the evidence."""
    return {
        (family_of(definition).name, kernel.label)
        for definition in definitions()
        for kernel in family_of(definition).kernels_of(definition)
        if kernel.unavailable(RECORDED_ON) is None
    }


def harness_power() -> str:
    """The text of docs/harness_power.md, from what is committed."""
    return document(read_summaries(RESULTS), read_reasons(KEPT))


def report(problems: list[str]) -> int:
    for line in problems:
        print(line, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    end_with(main)
