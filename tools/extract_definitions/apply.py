"""Carries out a plan. All files are validated and written to disk before the first one appears under its name."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from flashinfer_trace.dataset.validation import Problem, validate_paths
from tools.extract_definitions.family_lists import FamilyLists
from tools.extract_definitions.plan import CONFLICT, Plan

#: Problems with tags that follow from models/needs/, which is generated after the extraction.
GENERATED_LATER = re.compile(r"(tag-model .*|tag-(missing|unfounded) the tag .(model|tp|ep):.*)", re.DOTALL)


def problems_of(plan: Plan, root: Path) -> list[Problem]:
    """Problems that the validator finds in the Definitions to be written (not in those for review)."""
    with tempfile.TemporaryDirectory(prefix="extract_definitions_") as directory:
        definitions = Path(directory) / "definitions"
        for row in plan.rows:
            if row.path is not None and row.state != CONFLICT:
                copy = definitions / row.path.parent.name / row.path.name
                copy.parent.mkdir(exist_ok=True, parents=True)
                copy.write_text(row.text, encoding="utf-8")
        if not definitions.exists():
            return []
        if plan.lists.changed:
            root = _with_lists(root, plan.lists, Path(directory) / "root")
        problems = validate_paths([definitions], root).problems
        return [one for one in problems if not GENERATED_LATER.fullmatch(f"{one.rule} {one.message}")]


def _with_lists(root: Path, lists: FamilyLists, target: Path) -> Path:
    """A dataset root of links to another, but for the lists of families, which are as they will be."""
    place, target_of = root, target
    for part in lists.path.relative_to(root).parts:
        target_of.mkdir()
        for entry in place.iterdir():
            if entry.name != part:
                (target_of / entry.name).symlink_to(entry.resolve())
        place, target_of = place / part, target_of / part
    target_of.write_text(lists.text, encoding="utf-8")
    return target


def write(plan: Plan, definitions: Path) -> int:
    """Writes the files of a plan under `definitions`, and the lists of families beside them; returns their number.

    The lists are written only beside the Definitions of their own dataset. All files are first written next to
    `definitions`, so that a full disk changes nothing. Then each is renamed into place, so that an interruption leaves
    no half-written file and running again writes what is missing.

    Raises:
        OSError: a file cannot be written or renamed.
    """
    pending = [(row.path, row.text) for row in plan.rows if row.path is not None]
    if plan.lists.changed and lists_belong_to(plan, definitions):
        pending.insert(0, (plan.lists.path, plan.lists.text))
    if not pending:
        return 0
    definitions.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".extract_definitions_", dir=definitions.parent) as directory:
        staged = []
        for number, (path, text) in enumerate(pending):
            temporary = Path(directory) / str(number)
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(0o644)
            staged.append((temporary, path))
        for temporary, path in staged:
            path.parent.mkdir(exist_ok=True)
            os.replace(temporary, path)
    return len(staged)


def lists_belong_to(plan: Plan, definitions: Path) -> bool:
    """Whether the lists of families are those of the dataset that has these Definitions."""
    root = plan.lists.path.parents[1]
    return definitions.resolve() == (root / "definitions").resolve()
