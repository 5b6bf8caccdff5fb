"""Rules on evidence files, and on Definitions that claim to be verified."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.ledger import REQUIRED_CASES, VERIFIED, Ledger
from flashinfer_trace.reference import sha256
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.validation.schemas import check_schema

__all__ = ["check_evidence_file", "check_verified"]

_FIX = "record it with `flashinfer-trace verify --record` on a GPU, or tag it status:unverified"


def check_evidence_file(path: Path, root: Path, data: Any, schema: Any, findings: Findings) -> Ledger | None:
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
    return Ledger.from_json(data)


def check_verified(candidate: Candidate, ledger: Ledger | None, path: Path, root: Path, findings: Findings) -> None:
    """Checks that a Definition tagged status:verified is proven (see `flashinfer_trace.ledger`).

    Args:
        candidate: the Definition.
        ledger: its evidence, None if the file is missing or unusable (then it has problems of its own).
        path: where the evidence must lie.
        root: the dataset root.
        findings: those of the Definition.
    """
    pointer = pointer_of("tags", next(index for index, tag in candidate.tags if tag == VERIFIED))
    shown = path.relative_to(root).as_posix()
    if ledger is None:
        if not os.path.lexists(path):
            findings.add("evidence-missing", f"{VERIFIED}, but there is no {shown}", _FIX, pointer)
        return
    if candidate.name is None or candidate.op_type is None or candidate.reference is None:
        return
    definition = _Claim(candidate.name, candidate.op_type, sha256(candidate.reference))
    mismatch = ledger.mismatch(definition)
    if mismatch is not None:
        findings.add("evidence-mismatch", f"{VERIFIED}, but of {shown}: {mismatch}", _FIX, pointer)
    elif not ledger.proofs(definition):
        reasons = "; ".join(dict.fromkeys(f"{e.kernel_label}: {e.shortcoming}" for e in ledger.entries))
        message = f"{VERIFIED}, but no entry of {shown} passed with {REQUIRED_CASES} real cases ({reasons})"
        findings.add("evidence-failed", message, _FIX, pointer)


@dataclass(frozen=True)
class _Claim:
    """What the ledger must know of a Definition."""

    name: str
    op_type: str
    reference_sha256: str
