"""The rule on names that flashinfer-bench's dataset uses too."""

from __future__ import annotations

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.ecosystem import Compatibility
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, quote

__all__ = ["check_meaning"]

_FIX = "use another name, or list the difference with its reason in schema/compatibility.json"


def check_meaning(candidate: Candidate, known: Compatibility, findings: Findings) -> None:
    """Checks that a Definition takes the workloads and solutions of the one of the same name there.

    Args:
        candidate: the Definition; a malformed one has problems of its own.
        known: facts and decisions.
        findings: where problems go.
    """
    if candidate.name not in known.definitions:
        return
    try:
        Definition.from_dict(candidate.data)
    except InputError:
        return
    for one in known.unexpected(candidate.data):
        message = (
            f"in flashinfer-bench's dataset, {one.place} of this name is {quote(one.theirs)}, not {quote(one.ours)}"
        )
        findings.add("name-meaning", message, _FIX, "/name")
