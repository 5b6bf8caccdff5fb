"""Rules on evidence files, and on Definitions that claim to be verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.evidence import UNVERIFIED, VERIFIED, Evidence, run_file
from flashinfer_trace.dataset.evidence_run import Entry, Run, chosen_seed, fields_of, implausible, place_of
from flashinfer_trace.dataset.validation.candidate import Candidate
from flashinfer_trace.dataset.validation.machine_rules import Line, contradictions, odd_ones
from flashinfer_trace.dataset.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.dataset.validation.schemas import check_schema
from flashinfer_trace.format.json_source import JsonSourceError
from flashinfer_trace.kernels.table import KernelFacts

#: Most objections to the evidence of one Definition that are reported.
MAX_OBJECTIONS = 10
_RECORD = "record it again; do not edit it by hand"
_FIX = "record it with `flashinfer-trace verify --record` on a GPU, or tag it status:unverified"


def check_run_file(path: Path, root: Path, data: Any, schema: Any, findings: Findings) -> Run | None:
    """Checks the header of a run; None if it does not follow the schema or cannot have been recorded."""
    if check_schema(schema, data, findings, "evidence-invalid"):
        return None
    try:
        run = Run.from_json(path.stem, data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        findings.add("evidence-invalid", str(error), _RECORD)
        return None
    for field, reason in (("started_at", implausible(run.started_at)), ("seed", chosen_seed(run.seed))):
        if reason is not None:
            findings.add("evidence-invalid", reason, _RECORD, pointer_of(field))
    try:
        for place, message in contradictions(data, root):
            findings.add("evidence-invalid", message, _RECORD, pointer_of(*place))
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        findings.add("dataset-schema", f"schema/gpus.json: malformed ({error!r})", "see schema/gpus.schema.json")
    return None if findings.problems else run


def check_evidence_file(
    path: Path, data: Any, schema: Any, run_of: Callable[[str], Run | None], findings: Findings
) -> Evidence | None:
    """Checks one evidence file by itself; None if it does not follow the schema or cannot have been recorded."""
    if check_schema(schema, data, findings, "evidence-invalid"):
        return None
    entries, usable = [], True
    for index, line in enumerate(data):
        name = fields_of(line)["run"]
        run = run_of(name)
        if run is None:
            usable = False
            if not os.path.lexists(run_file(path.parent.parent, name)):
                message = f"there is no header of the run {name}"
                findings.add("evidence-invalid", message, _RECORD, pointer_of(index, *place_of("run")))
            continue
        try:
            entry = Entry.from_json(line, run)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # a schema that was changed
            findings.add("evidence-invalid", str(error), _RECORD, pointer_of(index))
            continue
        if entry.library and not entry.version:
            message = f"the run {run.name} does not list {quote(entry.library)}"
            findings.add("evidence-invalid", message, _RECORD, pointer_of(index, *place_of("library")))
        for place, reason in entry.contradictions:
            findings.add("evidence-invalid", reason, _RECORD, pointer_of(index, *place))
        entries.append(entry)
    evidence = Evidence(tuple(entries))
    for repeated in evidence.repeated():
        findings.add("evidence-invalid", f"the run of {repeated} is there twice", _RECORD)
    return evidence if usable and not findings.problems else None


def check_orphan(path: Path, root: Path, findings: Findings) -> None:
    """Checks that the Definition of an evidence file is there.

    Not for evidence that a checked Definition led to: that Definition may be about to be written, elsewhere so far.
    """
    try:
        relative = path.relative_to(root / "evidence").with_suffix(".json")
    except ValueError:
        relative = Path(path.parent.name) / f"{path.stem}.json"
    if len(relative.parts) != 2 or not os.path.isfile(root / "definitions" / relative):
        message = f"there is no Definition at definitions/{relative.as_posix()}"
        findings.add("evidence-orphan", message, "remove the evidence, or move it to its Definition's path")


def check_machines(
    every: Mapping[Path, Evidence | None], headers: Mapping[str, Any], findings_of: Callable[[Path], Findings]
) -> None:
    """Compares the machines of all evidence, which `check_evidence_file` has accepted file by file."""
    lines = [
        Line(path, index, entry.run.name)
        for path, evidence in every.items()
        for index, entry in enumerate(evidence.entries if evidence else ())
    ]
    for line, message in odd_ones(lines, headers):
        place = pointer_of(line.number, *place_of("run"))
        findings_of(line.path).add("evidence-invalid", message, _RECORD, place)


def check_verified(
    candidate: Candidate,
    evidence: Evidence | None,
    kernels: Mapping[str, KernelFacts],
    path: Path,
    root: Path,
    findings: Findings,
) -> None:
    """Checks that a Definition tagged status:verified is proven (see `flashinfer_trace.dataset.evidence`)."""
    pointer = pointer_of("tags", next(index for index, tag in candidate.tags if tag == VERIFIED))
    shown = path.relative_to(root).as_posix()
    if evidence is None:
        if not os.path.lexists(path):
            findings.add("evidence-missing", f"{VERIFIED}, but there is no {shown}", _FIX, pointer)
        return
    definition = candidate.definition
    if definition is None:
        return
    objections = evidence.objections(definition, kernels)
    for objection in objections[:MAX_OBJECTIONS]:
        rule = "evidence-failed" if objection.failed else "evidence-mismatch"
        findings.add(rule, f"{VERIFIED}, but of {shown}: {objection.text}", _FIX, pointer)


def check_release(
    candidate: Candidate, evidence: Evidence | None, kernels: Mapping[str, KernelFacts], findings: Findings
) -> None:
    """Checks that every kernel of a Definition that today's stack has on Hopper ran for it, judged by today's code."""
    definition = candidate.definition
    if definition is None:
        return
    pointer = pointer_of("tags", *(index for index, tag in candidate.tags if tag in (VERIFIED, UNVERIFIED)))
    for label, why in (evidence or Evidence(())).outdated(definition, kernels):
        command = f"flashinfer-trace verify {definition.name} --kernel '{label}' --device cuda --record"
        message = f"not released with {label}: {why}"
        findings.add("evidence-stale", message, f"run `{command}` on Hopper, with today's stack", pointer)
