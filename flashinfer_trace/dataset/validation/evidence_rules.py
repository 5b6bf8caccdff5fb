"""Rules on evidence files, and on Definitions that claim to be verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.evidence import VERIFIED, Ledger, LedgerError, code_today, kernel_label
from flashinfer_trace.dataset.evidence_run import chosen_seed, implausible
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.machine_rules import Machines, known_facts
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.dataset.validation.schemas import check_schema
from flashinfer_trace.format.json_source import JsonSourceError
from flashinfer_trace.kernels.names import KernelPathsError
from flashinfer_trace.kernels.table import KernelFacts

__all__ = ["check_evidence_file", "check_machines", "check_orphan", "check_verified"]

#: Most objections to the evidence of one Definition that are reported.
MAX_OBJECTIONS = 10
_RECORD = "record it again; do not edit it by hand"
_FIX = "record it with `flashinfer-trace verify --record` on a GPU, or tag it status:unverified"


def check_evidence_file(
    path: Path, root: Path, data: Any, schema: Any, machines: Machines, findings: Findings
) -> Ledger | None:
    """Checks one evidence file by itself; None if it does not follow the schema or cannot have been recorded.

    Args:
        path: where it lies, absolute.
        root: the dataset root.
        data: its JSON.
        schema: the compiled evidence schema.
        machines: takes in the runs of a file without problems.
        findings: where problems go.
    """
    if check_schema(schema, data, findings, "evidence-invalid"):
        return None
    for field, expected in (("definition", path.stem), ("op_type", path.parent.name)):
        if data[field] != expected:
            message = f"{field} is {quote(data[field])}, but the file's path says {quote(expected)}"
            findings.add("evidence-mismatch", message, _RECORD, pointer_of(field))
    try:
        ledger = Ledger.from_json(data)
    except LedgerError as error:  # a schema that was changed
        findings.add("evidence-invalid", str(error), _RECORD)
        return None
    before = len(findings.problems)
    for repeated in ledger.repeated():
        findings.add("evidence-invalid", f"the run of {repeated} is there twice", _RECORD, "/entries")
    for index, entry in enumerate(ledger.entries):
        for field, reason in (("recorded_at", implausible(entry.recorded_at)), ("seed", chosen_seed(entry.seed))):
            if reason is not None:
                findings.add("evidence-invalid", reason, _RECORD, pointer_of("entries", index, field))
        for place, reason in entry.contradictions:
            findings.add("evidence-invalid", reason, _RECORD, pointer_of("entries", index, *place))
        if entry.kernel_label != kernel_label(entry.path, entry.variant):
            message = f"the label is {quote(entry.kernel_label)}, but path and variant give another"
            findings.add("evidence-invalid", message, _RECORD, pointer_of("entries", index, "kernel", "label"))
    try:
        known = known_facts(root)
    except KernelPathsError as error:
        findings.add("dataset-schema", str(error).replace(f"{root}/", ""), "see schema/kernel_paths.schema.json")
        return None
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        findings.add("dataset-schema", f"schema/gpus.json: malformed ({error!r})", "see schema/gpus.schema.json")
        return None
    for index, run in enumerate(data["entries"]):
        for place, message in known.contradictions(run):
            findings.add("evidence-invalid", message, _RECORD, pointer_of("entries", index, *place))
    if len(findings.problems) > before:
        return None
    machines.add(path, data["entries"])
    return ledger


def check_orphan(path: Path, root: Path, findings: Findings) -> None:
    """Checks that the Definition of an evidence file is there.

    Not for evidence that a checked Definition led to: that Definition may be about to be written, elsewhere so far.
    """
    try:
        relative = path.relative_to(root / "evidence")
    except ValueError:
        relative = Path(path.parent.name) / path.name
    if len(relative.parts) != 2 or not os.path.isfile(root / "definitions" / relative):
        message = f"there is no Definition at definitions/{relative.as_posix()}"
        findings.add("evidence-orphan", message, "remove the evidence, or move it beside its Definition's path")


def check_machines(machines: Machines, findings_of: Callable[[Path], Findings]) -> None:
    """Compares the machines of all evidence, which `check_evidence_file` has accepted file by file."""
    for path, index, place, message in machines.odd_ones():
        findings_of(path).add("evidence-invalid", message, _RECORD, pointer_of("entries", index, *place))


def check_verified(
    candidate: Candidate,
    ledger: Ledger | None,
    kernels: Mapping[str, KernelFacts],
    path: Path,
    root: Path,
    release: bool,
    findings: Findings,
) -> None:
    """Checks that a Definition tagged status:verified is proven (see `flashinfer_trace.dataset.evidence`).

    Args:
        candidate: the Definition.
        ledger: its evidence, None if the file is missing or unusable (then it has problems of its own).
        kernels: those that compute it according to the table, by label.
        path: where the evidence must lie.
        root: the dataset root; its schema/naming.json must be usable.
        release: evidence that older code judged is a problem too.
        findings: those of the Definition.
    """
    pointer = pointer_of("tags", next(index for index, tag in candidate.tags if tag == VERIFIED))
    shown = path.relative_to(root).as_posix()
    if ledger is None:
        if not os.path.lexists(path):
            findings.add("evidence-missing", f"{VERIFIED}, but there is no {shown}", _FIX, pointer)
        return
    definition = candidate.definition
    if definition is None:
        return
    objections = ledger.objections(definition, kernels)
    for objection in objections[:MAX_OBJECTIONS]:
        rule = "evidence-failed" if objection.failed else "evidence-mismatch"
        findings.add(rule, f"{VERIFIED}, but of {shown}: {objection.text}", _FIX, pointer)
    if release and not objections:
        for entry, changed in ledger.stale(code_today(definition)):
            run = f"the run of {entry.kernel_label} on {entry.gpu}"
            message = f"{shown}: the code of the {' and of the '.join(changed)} has changed since {run}"
            findings.add("evidence-stale", message, "record it again before a release", pointer)
