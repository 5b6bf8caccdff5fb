"""Brings Definitions in line with ``reference/`` and ``evidence/``, changing nothing else in their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import definition_paths
from flashinfer_trace.definition import Definition
from flashinfer_trace.files import write_text
from flashinfer_trace.naming import Naming, family_of, load_naming
from flashinfer_trace.reference import ReferenceSourceError, render, sha256

__all__ = ["current_reference", "definition_text", "embed_all", "has_evidence"]


def embed_all(root: Path, write: bool, paths: Sequence[Path] | None = None) -> list[tuple[Path, str]]:
    """Renders every Definition's reference and sets its status tag to what the evidence says.

    Args:
        root: the dataset root.
        write: write the changed files; otherwise only report.
        paths: only these files of the dataset; all of them by default.

    Returns:
        The files that change, each with a word on what changes.

    Raises:
        ReferenceSourceError: a Definition has no family in schema/naming.json, or its reference cannot be rendered.
        InputError: a file is not a Definition.
    """
    naming = load_naming(root)
    changed = []
    for path in definition_paths(root) if paths is None else paths:
        definition = Definition.from_file(path)
        reference = current_reference(definition, root, naming)
        status = "status:verified" if has_evidence(root, definition, sha256(reference)) else "status:unverified"
        tags = [status if tag.startswith("status:") else tag for tag in definition.tags]
        changes = []
        if reference != definition.reference:
            changes.append("reference")
        if tags != list(definition.tags):
            changes.append(status)
        if not changes:
            continue
        changed.append((path, " and ".join(changes)))
        if write:
            data = json.loads(path.read_text(encoding="utf-8"))
            data["reference"], data["tags"] = reference, tags
            write_text(path, definition_text(data))
    return changed


def current_reference(definition: Definition, root: Path, naming: Naming) -> str:
    """What ``reference/`` renders for a Definition today.

    Raises:
        ReferenceSourceError: the Definition has no family in schema/naming.json, or its reference cannot be rendered.
    """
    family = family_of(definition, naming)
    if family is None:
        where = definition.path or definition.name
        raise ReferenceSourceError(f"{where}: no family in schema/naming.json fits this name; add its pattern there")
    return render(root, definition.op_type, family, definition.const_axes)


def has_evidence(root: Path, definition: Definition, reference_sha256: str) -> bool:
    """Whether the ledger holds a passed run of a real kernel for this hash of the reference."""
    path = root / "evidence" / definition.op_type / f"{definition.name}.json"
    if not path.is_file():
        return False
    try:
        ledger: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        passed = [entry for entry in ledger["entries"] if entry["result"] == "passed"]
        return ledger["reference_sha256"] == reference_sha256 and bool(passed)
    except (ValueError, KeyError, TypeError) as error:
        raise ReferenceSourceError(f"{path}: not an evidence file ({error!r}); record it again on a GPU") from error


def definition_text(data: dict[str, Any]) -> str:
    """The file form of a Definition: two spaces, keys in the order given, a newline at the end."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
