"""References that differ only in the integers of their constants: a family's, at other sizes, are checked once."""

from __future__ import annotations

import re
from collections.abc import Hashable

from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.problems import Findings
from flashinfer_trace.dataset.validation.reference_rules import (
    Reference,
    check_constant_values,
    check_reference,
    parse_reference,
)

__all__ = ["ReferenceMemo"]

#: A module constant that is an integer, alone on its line, as rendering leaves it; no more digits than an axis has.
_CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]*) = (0|[1-9][0-9]{0,17})$", re.MULTILINE)

#: Where Python's line numbers grow.
_LINE_BREAK = re.compile(r"\r\n|\r|\n")


class ReferenceMemo:
    """Parses and checks references; one whose like was found clean is not walked again.

    Nothing that the rules look at depends on such an integer but `check_constant_values`, which always runs. A
    reference with a problem is never remembered, so that every file with it is reported in full.
    """

    def __init__(self) -> None:
        self._clean: dict[Hashable, Reference] = {}

    def parse(self, candidate: Candidate, report: Findings) -> Reference | None:
        """As `parse_reference`."""
        like = self._clean.get(_likeness(candidate))
        if like is None or candidate.reference is None:
            return parse_reference(candidate, report)
        return _with_integers(like, candidate.reference)

    def check(self, reference: Reference, candidate: Candidate, report: Findings) -> None:
        """As `check_reference`."""
        likeness = _likeness(candidate)
        if likeness in self._clean:
            check_constant_values(reference, candidate, report)
            return
        before = len(report.problems)
        check_reference(reference, candidate, report)
        if len(report.problems) == before:
            self._clean[likeness] = reference


def _likeness(candidate: Candidate) -> Hashable:
    """What the rules on a reference look at, without the integers of its constants."""
    shapes = tuple((name, tensor.shape) for name, tensor in candidate.inputs.items())
    declared = tuple(
        tuple(section) if isinstance(section, dict) else None
        for section in (candidate.data.get("inputs"), candidate.data.get("outputs"))
    )
    source = _CONSTANT.sub(r"\1 = 0", candidate.reference or "")
    return (source, candidate.op_type, shapes, declared, tuple(candidate.const_axes))


def _with_integers(like: Reference, source: str) -> Reference:
    """A reference like another one, with the integers of its own source."""
    lines = _LINE_BREAK.split(source)
    reference = Reference(source, like.module, like.table)
    reference.constants = [
        (name, int(match[2]) if (match := _CONSTANT.fullmatch(lines[line - 1])) else value, line)
        for name, value, line in like.constants
    ]
    return reference
