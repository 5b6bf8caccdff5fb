"""One run: makes the mutants, judges those that no cache knows, checks the equivalents and sums up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import track

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.twins import has_real_size
from tools.mutate.cases import representative
from tools.mutate.judge import Verdict
from tools.mutate.mutants import Mutant, mutants
from tools.mutate.reasons import Reason, reason_of
from tools.mutate.runner import Store, check_store, default_store, source_key
from tools.mutate.summary import family_summary
from tools.shared.limited_pool import Ended

#: As `runner.judge_all`: judges (family, source, check) triples, and yields (number of the triple, verdict).
Judging = Callable[[Sequence[tuple[str, str, str]]], Iterator[tuple[int, Any]]]


@dataclass
class Campaign:
    """The results of a run.

    Attributes:
        summaries: by family (see `summary.family_summary`).
        mutants: all of them.
        problems: one line for each reason that does not hold.
        judged: how many mutants this run judged; the others' verdicts were kept from before.
    """

    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)
    mutants: list[Mutant] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    judged: int = 0


def run_campaign(families: Mapping[str, Family], equivalents: Sequence[Reason], judging: Judging) -> Campaign:
    """Judges every mutant of these families.

    A mutant with a reason is judged as well: a reason for one that is rejected is a problem, as is one whose check
    fails in any case.
    """
    campaign = Campaign()
    found: dict[str, list[Mutant]] = {}
    chosen: dict[str, Definition] = {}
    stores: dict[str, Store] = {}
    for name, family in families.items():
        chosen[name] = representative(family)
        found[name] = mutants(chosen[name], family)
        stores[name] = default_store(family, chosen[name])
        campaign.mutants += found[name]
    campaign.judged = judge_missing(campaign.mutants, stores, judging)
    verdicts = {name: [stores[name].known[source_key(m.source)] for m in own] for name, own in found.items()}
    checks = {name: check_store(family, chosen[name]) for name, family in families.items()}
    campaign.problems += failed_checks(found, verdicts, equivalents, checks, judging)
    for name in families:
        real = has_real_size(chosen[name])
        campaign.summaries[name] = family_summary(chosen[name].name, found[name], verdicts[name], equivalents, real)
    return campaign


def judge_missing(found: Sequence[Mutant], stores: Mapping[str, Store], judging: Judging) -> int:
    """Judges what the stores do not know, and writes each verdict down at once; returns how many that were."""
    missing = [m for m in found if source_key(m.source) not in stores[m.family].known]
    for number, verdict in shown(judging, [(m.family, m.source, "") for m in missing], "mutants"):
        stores[missing[number].family].add(source_key(missing[number].source), verdict)
    return len(missing)


def failed_checks(
    found: Mapping[str, Sequence[Mutant]],
    verdicts: Mapping[str, Sequence[Verdict]],
    equivalents: Sequence[Reason],
    stores: Mapping[str, Store],
    judging: Judging,
) -> list[str]:
    """A line for each mutant that is called equivalent and is not.

    The verdict tells already whether the bits are the same in the cases that judge.
    """
    lines: dict[str, str] = {}
    waiting: list[tuple[Mutant, str]] = []
    for name, own in found.items():
        for mutant, verdict in zip(own, verdicts[name], strict=True):
            reason = reason_of(mutant, equivalents)
            if reason is None:
                continue
            check = reason.check
            known = stores[name].known.get(check_key(mutant, check))
            if verdict.rejected:
                lines[mutant.id] = f"is rejected: {verdict.detail}"
            elif check == "bits" and not verdict.identical:
                lines[mutant.id] = "differs in a case that judges"
            elif known is None:
                waiting.append((mutant, check))
            else:
                lines[mutant.id] = known.detail
    tasks = [(mutant.family, mutant.source, check) for mutant, check in waiting]
    for number, line in shown(judging, tasks, "equivalents"):
        mutant, check = waiting[number]
        if isinstance(line, Ended):  # not remembered: the machine may have been busy
            lines[mutant.id] = line.detail
            continue
        stores[mutant.family].add(check_key(mutant, check), Verdict("differs" if line else "", 0, line))
        lines[mutant.id] = line
    contents = {mutant.id: mutant.content for own in found.values() for mutant in own}
    return [f"{name} ({contents[name]}) is called equivalent: {line}" for name, line in lines.items() if line]


def check_key(mutant: Mutant, check: str) -> str:
    return f"{source_key(mutant.source)} {check}"


def shown(judging: Judging, tasks: Sequence[tuple[str, str, str]], what: str) -> Iterator[tuple[int, Any]]:
    """The verdicts of `judging`, with a bar on a terminal."""
    console = Console(stderr=True)
    quiet = not console.is_terminal
    yield from track(judging(tasks), what, total=len(tasks), console=console, disable=quiet, transient=True)
