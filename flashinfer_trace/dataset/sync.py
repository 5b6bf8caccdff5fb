"""Brings everything that is derived and committed up to date: in a checkout its data files, then the Definitions.

The order of derivation: (models/, traces/) -> models/needs/, models/recorded/; with the table of kernels and evidence/,
these -> tags and embedded references -> validation.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.kernel_tags import kernel_tags
from flashinfer_trace.dataset.model_claims import ModelClaims, ModelClaimsError, load_model_claims
from flashinfer_trace.dataset.store import PACKAGE, definition_paths
from flashinfer_trace.format import json_source
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.files import json_text, read_bytes, sweep, write_text
from flashinfer_trace.format.naming import Naming, NamingError, family_name, load_naming, ordered
from flashinfer_trace.format.reference import ReferenceSourceError, render, source_path
from flashinfer_trace.kernels.private import PrivateKernelsError

#: Changed tags that a message names.
MOST_TAGS = 20


class SyncError(ValueError):
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


def sync(root: Path, write: bool, names: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Brings the derived data files of a checkout up to date, and then Definitions.

    Returns:
        The files that change, each with a short description of the change. Unless they are written, outdated data files
        are all that is returned: the Definitions follow from them.
    """
    derived = sync_data_files(root, write)
    return derived if derived and not write else [*derived, *sync_definitions(root, write, names)]


def sync_data_files(root: Path, write: bool) -> list[tuple[Path, str]]:
    """Runs the tool that derives them, if the dataset is that of the checkout whose code runs already."""
    if root.resolve() != PACKAGE.parent or not (root / "tools" / "derive.py").is_file():
        return []
    if importlib.util.find_spec("torch") is None:
        raise SyncError("in a checkout, sync reads the harness records, which need torch: pip install -e '.[verify]'")
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "tools.derive", *([] if write else ["--check"])],
        cwd=root,
        env={**os.environ, "FLASHINFER_TRACE_ROOT": str(root), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SyncError(
            done.stderr.strip() or f"in this checkout, python -m tools.derive ended with exit status {done.returncode}"
        )
    return [(root / one["file"], one["change"]) for one in json.loads(done.stdout)]


def names_of_files(root: Path, paths: Sequence[Path]) -> list[str]:
    """The Definitions that follow from files of the dataset; none stands for the whole dataset.

    These are the Definition of its own file or of its evidence, and those of the op_type of a reference. All follow
    from any other file.
    """
    found: dict[str, None] = {}
    every = definition_paths(root)
    for path in paths:
        try:
            part, op_type, name = path.resolve().relative_to(root.resolve()).parts
        except ValueError:
            return []
        if part in ("definitions", "evidence"):
            found.update({one.stem: None for one in every if one.stem == Path(name).stem})
        elif part == "reference":
            found.update({one.stem: None for one in every if one.parent.name == op_type})
        else:
            return []
    return list(found)


def sync_definitions(root: Path, write: bool, names: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Renders the references of Definitions, and sets their status by the evidence and the other tags by models/.

    Without models/, all tags but the status and those of kernels stay.

    Nothing is written unless all of them are valid afterwards.

    Args:
        root: the dataset root.
        write: whether to write the changed files, or only report them.
        names: names or globs of Definitions; the whole dataset if empty.

    Returns:
        The files that change, each with a short description of the change.

    Raises:
        SyncError: a name matches no Definition; a file is not a valid Definition, or would not be one afterwards;
            a reference cannot be rendered; evidence cannot be read or is not valid; or several Definitions would lose
            status:verified because their evidence files are gone. One file alone may be removed on purpose, if
            evidence/ is there.
    """
    from flashinfer_trace.dataset.validation import Result, format_text, validate_paths  # not needed by verify

    paths = _selected(root, names)
    try:
        naming = load_naming(root)
        claims = load_model_claims(root)
        embedded = [_embed(root, path, naming, claims) for path in paths]
    except (
        ReferenceSourceError,
        NamingError,
        PrivateKernelsError,
        ModelClaimsError,
        InputError,
        proof.EvidenceError,
    ) as error:
        raise SyncError(str(error)) from error
    _check_losses(proof.evidence_directory(root), [one.path.stem for one in embedded if one.lacks])
    # That of a Definition which stays verified is checked with it.
    if evidence := [one.unproving for one in embedded if one.unproving]:
        found: Result = validate_paths(evidence, root)
        if found.problems:
            fix = "restore it from version control (`git restore evidence`), or delete it on purpose"
            raise SyncError(f"evidence is not valid; nothing was written; {fix}\n{format_text(found)}")
    if embedded:
        found = validate_paths(paths, root, {one.path: one.text for one in embedded})
        if found.problems:
            where = " (lines of what would be written)" if any(one.changes for one in embedded) else ""
            raise SyncError(f"not valid; nothing was written{where}\n{format_text(found)}")
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
        purpose = "; to remove one on purpose, run `flashinfer-trace sync NAME` for it alone" if there else ""
        raise SyncError(
            f"{evidence} {'lacks files' if there else 'is missing'}, and {counted} would lose {proof.VERIFIED} "
            f"({shown}); restore it from version control{purpose}"
        )


def outdated_reference(root: Path, definition: Definition) -> str | None:
    """Why the embedded reference is not what ``reference/`` renders now; None if it is (or if the source is missing).

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
        f"run `flashinfer-trace sync {definition.name}`"
    )


def _selected(root: Path, names: Sequence[str]) -> list[Path]:
    paths = definition_paths(root)
    selected: dict[Path, None] = {}
    for name in names:
        found = [path for path in paths if fnmatch.fnmatchcase(path.stem, name)]
        if not found:
            close = difflib.get_close_matches(name, [path.stem for path in paths], 1)
            hint = f"did you mean {close[0]}?" if close else "`flashinfer-trace list` shows all names"
            raise SyncError(f"no Definition matches {name!r}; {hint}")
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
    is_proven = proof.proven(root, dataclasses.replace(definition, reference=reference))
    evidence = proof.evidence_path(root, definition)
    status = proof.VERIFIED if is_proven else proof.UNVERIFIED
    changes = []
    if definition.reference != reference:
        data["reference"] = reference
        changes.append("reference")
    # Tags that are not a list of strings are left as they are, so validation reports them.
    tags = data.get("tags")
    lacks = False
    if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags):
        own = [status if tag.startswith("status:") else tag for tag in tags]
        if own != tags:
            changes.append(status)
            lacks = proof.VERIFIED in tags and not evidence.exists()
        kernels = kernel_tags(root, data)
        data["tags"] = own
        if claims is None:
            data["tags"] = kernels.applied(own, naming)
        else:
            of_family = naming.families[family].tags_of(definition.name)
            if set(own) != (wanted := {status, *claims.calls(definition.name), *of_family, *kernels.tags}):
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
    """The changes of tags, for a person: each once, and the first of many."""
    signed = [f"-{tag}" for tag in dict.fromkeys(old) if tag not in new] + [f"+{tag}" for tag in new if tag not in old]
    rest = f" and {len(signed) - MOST_TAGS} more" if len(signed) > MOST_TAGS else ""
    return f"tags ({' '.join(signed[:MOST_TAGS])}{rest})"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json_source.load_object(path)
    except json_source.JsonSourceError as error:
        raise InputError(f"{path}: {error}") from None
