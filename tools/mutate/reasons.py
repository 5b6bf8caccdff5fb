"""Written reasons: why a mutant is equivalent to the reference, or why one that the harness accepts is kept."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from flashinfer_trace.format.files import UnreadableFile, read_bytes
from flashinfer_trace.format.json_source import TRACES, JsonSourceError, parse
from tools.mutate.mutants import Mutant

#: Mutants that compute the same. Every run checks each of them, as `Reason.check` says.
EQUIVALENTS = Path(__file__).with_name("equivalents.json")

#: Mutants that compute something else and are accepted, each with the reason why that is known and allowed.
KEPT = Path(__file__).with_name("kept.json")

CHECKS = ("bits", "rounding")


class ReasonError(ValueError):
    """A file of reasons that cannot be used. The message names the file, the place and the fix."""


@dataclass(frozen=True)
class Reason:
    """One reason for all mutants of these content hashes (see `Mutant.content`).

    Attributes:
        reason: why.
        check: ``bits``: their outputs have the same bits as the reference's in every case; ``rounding``: they differ by
            float32 sums in another order at most (see `equivalence.same_up_to_rounding`).
        families: patterns of the families that it is for: what is shared may be equivalent in some only.
        mutants: the change as text for each hash, for the reader.
    """

    reason: str
    check: str = "bits"
    families: tuple[str, ...] = ("*",)
    mutants: dict[str, str] = field(default_factory=dict)

    def covers(self, mutant: Mutant) -> bool:
        """Whether the reason is for this family's mutant."""
        return mutant.content in self.mutants and any(fnmatch.fnmatch(mutant.family, name) for name in self.families)


def read_reasons(path: Path) -> list[Reason]:
    """The reasons of a file.

    Raises:
        ReasonError: the file is not JSON of the form [{"reason": text, "check": name, "families": [pattern],
            "mutants": {hash: change}}], or an entry has no reason, no mutants or an unknown check.
    """
    try:
        entries = [Reason(**entry) for entry in parse(read_bytes(path), TRACES).data]
    except (UnreadableFile, JsonSourceError, TypeError) as error:
        raise ReasonError(f"{path}: cannot be read: {error}; write a list of reason, check and mutants") from error
    for number, entry in enumerate(entries):
        listed = isinstance(entry.families, (list, tuple)) and isinstance(entry.mutants, dict)
        if not listed or not all(isinstance(text, str) for text in (entry.reason, *entry.families)):
            raise ReasonError(f"{path}: entry {number}: reason and families are texts, mutants is an object; write so")
        if not entry.reason.strip() or not entry.mutants:
            raise ReasonError(f"{path}: entry {number} has no reason or no mutants; write both")
        if entry.check not in CHECKS:
            raise ReasonError(f"{path}: entry {number} has the check {entry.check!r}; it is one of {list(CHECKS)}")
    return entries


def reason_of(mutant: Mutant, reasons: Iterable[Reason]) -> Reason | None:
    """The reason that is given for a mutant, or None."""
    return next((reason for reason in reasons if reason.covers(mutant)), None)


def unmatched(reasons: Iterable[Reason], mutants: Iterable[Mutant]) -> list[str]:
    """Content hashes with a reason that no mutant has: the code that they were written for is gone."""
    mutants = list(mutants)
    lines = []
    for reason in reasons:
        covered = {mutant.content for mutant in mutants if reason.covers(mutant)}
        lines += [content for content in reason.mutants if content not in covered]
    return lines
