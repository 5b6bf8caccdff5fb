"""Written reasons: why a mutant is equivalent to the reference, or why one that the harness accepts is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tools.mutate.mutants import Mutant

__all__ = ["EQUIVALENTS", "KEPT", "Reason", "ReasonError", "read_reasons", "unmatched"]

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
        mutants: the change as text for each hash, for the reader.
    """

    reason: str
    check: str = "bits"
    mutants: dict[str, str] = field(default_factory=dict)


def read_reasons(path: Path) -> dict[str, Reason]:
    """Reason by content hash.

    Raises:
        ReasonError: the file is not JSON of the form [{"reason": text, "check": name, "mutants": {hash: change}}], an
            entry has no reason, no mutants or an unknown check, or one hash has two reasons.
    """
    try:
        entries = [Reason(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ReasonError(f"{path}: cannot be read: {error}; write a list of reason, check and mutants") from error
    found: dict[str, Reason] = {}
    for number, entry in enumerate(entries):
        if not entry.reason.strip() or not entry.mutants:
            raise ReasonError(f"{path}: entry {number} has no reason or no mutants; write both")
        if entry.check not in CHECKS:
            raise ReasonError(f"{path}: entry {number} has the check {entry.check!r}; it is one of {list(CHECKS)}")
        for content in entry.mutants:
            if content in found:
                raise ReasonError(f"{path}: {content} stands twice; keep one reason")
            found[content] = entry
    return found


def unmatched(reasons: Iterable[str], mutants: Iterable[Mutant]) -> list[str]:
    """Content hashes with a reason that no mutant has: the code that they were written for is gone."""
    known = {mutant.content for mutant in mutants}
    return sorted(set(reasons) - known)
