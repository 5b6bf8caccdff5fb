"""Brings Definitions up to date with ``reference/``, ``evidence/`` and ``models/``; else only their layout changes."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import json_source, ledger
from flashinfer_trace.dataset import definition_paths
from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.files import json_text, read_bytes, sweep, write_text
from flashinfer_trace.kernel_paths import KernelPathsError, claimable
from flashinfer_trace.model_claims import ModelClaims, ModelClaimsError, load_model_claims
from flashinfer_trace.naming import Naming, NamingError, family_name, load_naming, ordered
from flashinfer_trace.records import RecordsError
from flashinfer_trace.reference import ReferenceSourceError, render, source_path

__all__ = ["EmbeddingError", "embed_all", "outdated_reference"]

#: Changed tags that a message names.
MOST_TAGS = 20


class EmbeddingError(ValueError):
    """A Definition cannot be brought up to date. The message names each file, what is wrong with it, and the fix."""


@dataclasses.dataclass(frozen=True)
class _Embedded:
    """One Definition brought up to date.

    Attributes:
        path, text: its file, and the new text.
        changes: what changes; "" if nothing does.
        lacks: whether it loses status:verified because it has no evidence file.
        unproving: its evidence file, if there is one that does not prove it.
    """

    path: Path
    text: str
    changes: str
    lacks: bool
    unproving: Path | None


def embed_all(root: Path, write: bool, names: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Renders the references of Definitions, and sets their status by the evidence and the other tags by models/.

    The tags of a family that models/curated/family_tags.json lacks stay, each kernel in the namespace of its state.

    Nothing is written unless all of them are valid afterwards.

    Args:
        root: the dataset root.
        write: whether to write the changed files, or only report them.
        names: names or globs of Definitions; the whole dataset if empty.

    Returns:
        The files that change, each with a short description of the change.

    Raises:
        EmbeddingError: a name matches no Definition; a file is not a valid Definition, or would not be one afterwards;
            a reference cannot be rendered; evidence cannot be read or is not valid; or several Definitions would lose
            status:verified because their evidence files are gone. One file alone may be removed on purpose, if
            evidence/ is there.
    """
    from flashinfer_trace.validation import Result, format_text, validate_paths  # not needed by verify

    paths = _selected(root, names)
    try:
        naming = load_naming(root)
        claims = load_model_claims(root)
        embedded = [_embed(root, path, naming, claims) for path in paths]
    except (
        ReferenceSourceError,
        NamingError,
        RecordsError,
        KernelPathsError,
        ModelClaimsError,
        InputError,
        ledger.LedgerError,
    ) as error:
        raise EmbeddingError(str(error)) from error
    _check_losses(ledger.evidence_directory(root), [one.path.stem for one in embedded if one.lacks])
    # That of a Definition which stays verified is checked with it.
    if evidence := [one.unproving for one in embedded if one.unproving]:
        found: Result = validate_paths(evidence, root)
        if found.problems:
            fix = "restore it from version control (`git restore evidence`), or delete it on purpose"
            raise EmbeddingError(f"evidence is not valid; nothing was written; {fix}\n{format_text(found)}")
    if embedded:
        found = validate_paths(paths, root, {one.path: one.text for one in embedded})
        if found.problems:
            where = " (lines of what would be written)" if any(one.changes for one in embedded) else ""
            raise EmbeddingError(f"not valid; nothing was written{where}\n{format_text(found)}")
    changed = [one for one in embedded if one.changes]
    if write:
        for directory in {path.parent for path in paths}:  # files that a killed run left, even if nothing changes now
            sweep(directory)
        for one in changed:
            write_text(one.path, one.text)
    return [(one.path, one.changes) for one in changed]


def _check_losses(evidence: Path, names: Sequence[str]) -> None:
    """Refuses to take the status from these Definitions, which have no evidence file, unless it can be on purpose."""
    there = evidence.is_dir()
    if len(names) > 1 or (names and not there):
        counted = f"{len(names)} Definition{'s'[: len(names) != 1]}"
        shown = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
        purpose = "; to remove one on purpose, run `flashinfer-trace embed NAME` for it alone" if there else ""
        raise EmbeddingError(
            f"{evidence} {'lacks files' if there else 'is missing'}, and {counted} would lose {ledger.VERIFIED} "
            f"({shown}); restore it from version control{purpose}"
        )


def outdated_reference(root: Path, definition: Definition) -> str | None:
    """Why the embedded reference is not what ``reference/`` renders now; None if it is (or if there is no source).

    Args:
        root: the dataset root that the Definition was read from.
        definition: as loaded, at its real sizes.

    Raises:
        NamingError: schema/naming.json of that root is missing or malformed.
    """
    family = family_name(definition, load_naming(root))
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


def _selected(root: Path, names: Sequence[str]) -> list[Path]:
    paths = definition_paths(root)
    selected: dict[Path, None] = {}
    for name in names:
        found = [path for path in paths if fnmatch.fnmatchcase(path.stem, name)]
        if not found:
            close = difflib.get_close_matches(name, [path.stem for path in paths], 1)
            hint = f"did you mean {close[0]}?" if close else "`flashinfer-trace list` shows all names"
            raise EmbeddingError(f"no Definition matches {name!r}; {hint}")
        selected.update(dict.fromkeys(found))
    return list(selected) if names else paths


def _embed(root: Path, path: Path, naming: Naming, claims: ModelClaims | None) -> _Embedded:
    data = _read(path)
    definition = Definition.from_dict(data, path)
    family = family_name(definition, naming)
    if family is None:
        raise ReferenceSourceError(
            f"{path}: no family in schema/naming.json has this name and op_type; correct them "
            "(`flashinfer-trace validate` shows what is known), or add the pattern of a new family there"
        )
    reference = render(root, definition.op_type, family, definition.const_axes)
    is_proven = ledger.proven(root, dataclasses.replace(definition, reference=reference))
    evidence = ledger.evidence_path(root, definition)
    status = ledger.VERIFIED if is_proven else ledger.UNVERIFIED
    changes = []
    if definition.reference != reference:
        data["reference"] = reference
        changes.append("reference")
    # Tags that are not a list of strings are left as they are, so that validation reports them.
    tags = data.get("tags")
    lacks = False
    if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags):
        own = [status if tag.startswith("status:") else tag for tag in tags]
        if own != tags:
            changes.append(status)
            lacks = ledger.VERIFIED in tags and not evidence.exists()
        kernels = claimable(root, data)
        shared = claims.shares(definition.name, family, kernels) if claims else None
        data["tags"] = own
        if claims is None or shared is None:
            data["tags"] = kernels.retagged(own, naming)
        elif set(own) != (wanted := {status, *claims.calls(definition.name), *shared}):
            data["tags"] = ordered(wanted, naming)
        if data["tags"] != own:
            changes.append(_difference(own, data["tags"]))
    text = json_text(data)
    if not changes and read_bytes(path) != text.encode():
        changes.append("layout")
    return _Embedded(
        path, text, " and ".join(changes), lacks, evidence if not is_proven and evidence.exists() else None
    )


def _difference(old: list[str], new: list[str]) -> str:
    """What changes in tags, for a person: each once, and the first of many."""
    signed = [f"-{tag}" for tag in dict.fromkeys(old) if tag not in new] + [f"+{tag}" for tag in new if tag not in old]
    rest = f" and {len(signed) - MOST_TAGS} more" if len(signed) > MOST_TAGS else ""
    return f"tags ({' '.join(signed[:MOST_TAGS])}{rest})"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json_source.load_object(path)
    except json_source.JsonSourceError as error:
        raise InputError(f"{path}: {error}") from None
