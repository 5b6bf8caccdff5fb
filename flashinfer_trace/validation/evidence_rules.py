"""Rules on evidence files, and on Definitions that claim to be verified."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.json_source import JsonSourceError, load_object
from flashinfer_trace.ledger import (
    VERIFIED,
    Ledger,
    LedgerError,
    implausible,
    kernel_label,
    kernels_today,
    module_today,
)
from flashinfer_trace.validation.candidate import Candidate
from flashinfer_trace.validation.problems import Findings, pointer_of, quote
from flashinfer_trace.validation.schemas import check_schema

__all__ = ["check_evidence_file", "check_verified"]

#: Most objections to the evidence of one Definition that are reported.
MAX_OBJECTIONS = 10
_RECORD = "record it again; do not edit it by hand"
_FIX = "record it with `flashinfer-trace verify --record` on a GPU, or tag it status:unverified"


def check_evidence_file(path: Path, root: Path, data: Any, schema: Any, findings: Findings) -> Ledger | None:
    """Checks one evidence file by itself; None if it does not follow the schema or cannot have been recorded.

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
        if (reason := implausible(entry.recorded_at)) is not None:
            findings.add("evidence-invalid", reason, _RECORD, pointer_of("entries", index, "recorded_at"))
        if entry.kernel_label != kernel_label(entry.path, entry.variant):
            message = f"the label is {quote(entry.kernel_label)}, but path and variant give another"
            findings.add("evidence-invalid", message, _RECORD, pointer_of("entries", index, "kernel", "label"))
    try:
        table = root / "schema" / "gpus.json"
        gpus = _capabilities(table, table.stat().st_mtime_ns) if table.exists() else {}
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        findings.add("dataset-schema", f"schema/gpus.json: malformed ({error!r})", "see schema/gpus.schema.json")
        return None
    for index, run in enumerate(data["entries"]):
        for place, message in _contradictions(run["kernel"], run["environment"], gpus):
            findings.add("evidence-invalid", message, _RECORD, pointer_of("entries", index, *place))
    return ledger if len(findings.problems) == before else None


def _contradictions(
    kernel: Mapping[str, str], environment: Mapping[str, Any], gpus: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Place and text of what cannot be of one machine: figures that were edited, or copied from another run."""
    library, version, gpu = kernel["library"], kernel["version"], environment["gpu"]
    installed = environment["libraries"].get(library, version)
    if installed != version:
        yield ("kernel", "version"), f"{library} is {quote(version)}, but the environment has {quote(installed)}"
    capability = gpus.get(gpu["name"], gpu["compute_capability"])
    if capability != gpu["compute_capability"]:
        message = f"{gpu['name']} has compute capability {capability}, not {quote(gpu['compute_capability'])}"
        yield ("environment", "gpu", "compute_capability"), message
    build = environment["torch"].partition("+cu")[2]
    if build.isdecimal() and build != environment["cuda"].replace(".", ""):
        yield ("environment", "cuda"), f"torch {environment['torch']} is not for CUDA {quote(environment['cuda'])}"


@functools.lru_cache(maxsize=8)
def _capabilities(path: Path, _modified: int) -> dict[str, str]:
    """The compute capability of each GPU that schema/gpus.json names."""
    return {name: gpu["compute_capability"] for gpu in load_object(path)["gpus"].values() for name in gpu["names"]}


def check_verified(
    candidate: Candidate, ledger: Ledger | None, path: Path, root: Path, release: bool, findings: Findings
) -> None:
    """Checks that a Definition tagged status:verified is proven (see `flashinfer_trace.ledger`).

    Args:
        candidate: the Definition.
        ledger: its evidence, None if the file is missing or unusable (then it has problems of its own).
        path: where the evidence must lie.
        root: the dataset root; its schema/naming.json must be usable.
        release: evidence that older code judged is a problem too.
        findings: those of the Definition.

    Raises:
        RecordsError: schema/records.json is unusable.
    """
    pointer = pointer_of("tags", next(index for index, tag in candidate.tags if tag == VERIFIED))
    shown = path.relative_to(root).as_posix()
    if ledger is None:
        if not os.path.lexists(path):
            findings.add("evidence-missing", f"{VERIFIED}, but there is no {shown}", _FIX, pointer)
        return
    try:
        definition = Definition.from_dict(candidate.data)
    except InputError:
        return  # it has problems of its own
    objections = ledger.objections(definition, kernels_today(root, definition))
    for objection in objections[:MAX_OBJECTIONS]:
        rule = "evidence-failed" if objection.failed else "evidence-mismatch"
        findings.add(rule, f"{VERIFIED}, but of {shown}: {objection.text}", _FIX, pointer)
    if release and not objections:
        for label, changed in ledger.stale(module_today(root, definition)).items():
            message = f"{shown}: the code of the {' and of the '.join(changed)} has changed since the run of {label}"
            findings.add("evidence-stale", message, "record it again before a release", pointer)
