"""Written reasons: why a mutant is equivalent to the reference, or why one that the harness accepts is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.mutate.mutants import Mutant

__all__ = ["EQUIVALENTS", "KEPT", "Reason", "ReasonError", "read_reasons", "unmatched"]

#: Mutants that compute the same. Each entry is checked in every run: its mutants must answer with the same bits as the
#: reference in all cases that judge, and in those of `cases.MORE_EXAMPLES`.
EQUIVALENTS = Path(__file__).with_name("equivalents.json")

#: Mutants that compute something else and are accepted, each with the reason why that is known and allowed.
KEPT = Path(__file__).with_name("kept.json")


class ReasonError(ValueError):
    """A file of reasons that cannot be read. The message names the file, the place and the fix."""


@dataclass(frozen=True)
class Reason:
    """One reason for all mutants of these content hashes (see `Mutant.content`).

    `mutants` gives each hash with the change as text, for the reader.
    """

    reason: str
    mutants: dict[str, str]


def read_reasons(path: Path) -> dict[str, str]:
    """Reason by content hash.

    Raises:
        ReasonError: the file is not JSON of the form [{"reason": text, "mutants": {hash: change}}], gives an empty
            reason, or gives one hash two reasons.
    """
    try:
        entries = [Reason(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ReasonError(f"{path}: cannot be read: {error}; write a list of reason and mutants") from error
    found: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if not entry.reason.strip() or not entry.mutants:
            raise ReasonError(f"{path}: entry {number} has no reason or no mutants; write both")
        for content in entry.mutants:
            if content in found:
                raise ReasonError(f"{path}: {content} stands twice; keep one reason")
            found[content] = entry.reason
    return found


def unmatched(reasons: Iterable[str], mutants: Iterable[Mutant]) -> list[str]:
    """Content hashes with a reason that no mutant has: the code that they were written for is gone."""
    known = {mutant.content for mutant in mutants}
    return sorted(set(reasons) - known)
