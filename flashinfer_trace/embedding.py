"""Brings Definitions in line with ``reference/`` and ``evidence/``, changing nothing else in their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import definition_paths
from flashinfer_trace.definition import Definition
from flashinfer_trace.files import write_text
from flashinfer_trace.naming import family_of, load_naming
from flashinfer_trace.reference import ReferenceSourceError, render, sha256, source_path

__all__ = ["definition_text", "embed_all", "has_evidence", "outdated_reference"]


def embed_all(root: Path, write: bool, names: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Renders every Definition's reference and sets its status tag to what the evidence says.

    Args:
        root: the dataset root.
        write: write the changed files; otherwise only report.
        names: only these Definitions; all of the dataset if empty.

    Returns:
        The files that change, each with a word on what changes.

    Raises:
        ReferenceSourceError: a Definition has no family in schema/naming.json, or its reference cannot be rendered.
        InputError: a file is not a Definition.
    """
    naming = load_naming(root)
    changed = []
    for path in definition_paths(root):
        if names and path.stem not in names:
            continue
        definition = Definition.from_file(path)
        family = family_of(definition, naming)
        if family is None:
            raise ReferenceSourceError(f"{path}: no family in schema/naming.json fits this name; add its pattern there")
        reference = render(root, definition.op_type, family, definition.const_axes)
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


def outdated_reference(root: Path, definition: Definition) -> str | None:
    """Why the embedded reference is not what ``reference/`` renders today, None if it is (or if there is no source).

    Args:
        root: the dataset root that the Definition was read from.
        definition: as loaded, at its real sizes.

    Raises:
        NamingError: schema/naming.json of that root is missing or malformed.
    """
    family = family_of(definition, load_naming(root))
    if family is None or not source_path(root, definition.op_type, family).is_file():
        return None
    source = f"reference/{definition.op_type}/{family}.py"
    try:
        rendered = render(root, definition.op_type, family, definition.const_axes)
    except ReferenceSourceError as error:
        return str(error)
    if rendered == definition.reference:
        return None
    return (
        f"{definition.name}: the embedded reference is older than {source}; "
        f"run `flashinfer-trace embed {definition.name}`"
    )


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
