"""Rules on evidence files, and on Definitions that claim to be verified."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.validation.schemas import check_schema

__all__ = ["Evidence", "check_evidence_file", "check_verified"]


@dataclass(frozen=True)
class Evidence:
    """One evidence file that follows its schema.

    Attributes:
        data: the parsed JSON.
    """

    data: dict[str, Any]

    @property
    def proves(self) -> bool:
        """Whether an entry passed with at least one case that is not vacuous."""
        return any(e["result"] == "passed" and e["cases"] > e["vacuous"] for e in self.data["entries"])


def check_evidence_file(path: Path, root: Path, data: Any, schema: Any, findings: Findings) -> Evidence | None:
    """Checks one evidence file by itself; None if it does not follow the schema.

    Args:
        path: where it lies, absolute.
        root: the dataset root.
        data: its JSON.
        schema: the compiled evidence schema.
        findings: where problems go.
    """
    try:
        relative = path.relative_to(root / "evidence")
    except ValueError:
        relative = Path(path.parent.name) / path.name
    if len(relative.parts) != 2 or not os.path.isfile(root / "definitions" / relative):
        message = f"there is no Definition at definitions/{relative.as_posix()}"
        findings.add("evidence-orphan", message, "remove the evidence, or move it beside its Definition's path")
    if check_schema(schema, data, findings, "evidence-invalid"):
        return None
    for field, expected in (("definition", path.stem), ("op_type", path.parent.name)):
        if data[field] != expected:
            message = f"{field} is {quote(data[field])}, but the file's path says {quote(expected)}"
            findings.add("evidence-mismatch", message, "record it again; do not edit it by hand", pointer_of(field))
    return Evidence(data)


def check_verified(candidate: Candidate, evidence: Evidence | None, path: Path, root: Path, findings: Findings) -> None:
    """Checks that a Definition tagged status:verified is backed by its evidence.

    Args:
        candidate: the Definition.
        evidence: its evidence, None if the file is missing or unusable (then it has problems of its own).
        path: where the evidence must lie.
        root: the dataset root.
        findings: those of the Definition.
    """
    index = next(index for index, tag in candidate.tags if tag == "status:verified")
    pointer = pointer_of("tags", index)
    shown = path.relative_to(root).as_posix()
    mend = "record it with `flashinfer-trace verify --record` on a GPU, or tag it status:unverified"
    if evidence is None:
        if not os.path.lexists(path):
            findings.add("evidence-missing", f"status:verified, but there is no {shown}", mend, pointer)
        return
    if candidate.reference is not None:
        actual = hashlib.sha256(candidate.reference.encode()).hexdigest()
        if evidence.data["reference_sha256"] != actual:
            message = f"status:verified, but {shown} is for another reference (its hash is not {actual[:12]}...)"
            findings.add("evidence-mismatch", message, mend, pointer)
    if not evidence.proves:
        message = f"status:verified, but no entry of {shown} passed with a real case"
        findings.add("evidence-failed", message, mend, pointer)
