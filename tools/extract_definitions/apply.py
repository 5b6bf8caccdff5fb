"""Carries out a plan. All files are validated and written to disk before the first one appears under its name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flashinfer_trace.validation import Problem, validate_paths
from tools.extract_definitions.plan import CONFLICT, Row


def problems_of(rows: Sequence[Row], root: Path) -> list[Problem]:
    """Problems that the validator finds in the Definitions to be written (not in those for review)."""
    with tempfile.TemporaryDirectory(prefix="extract_definitions_") as directory:
        for row in rows:
            if row.path is not None and row.state != CONFLICT:
                copy = Path(directory) / row.path.parent.name / row.path.name
                copy.parent.mkdir(exist_ok=True)
                copy.write_text(row.text, encoding="utf-8")
        if not any(Path(directory).iterdir()):
            return []
        problems = validate_paths([Path(directory)], root).problems
        # models/needs/, from which the tags follow, is generated after the extraction.
        return [one for one in problems if one.rule not in ("tag-model", "tag-missing", "tag-unfounded")]


def write(rows: Sequence[Row], definitions: Path) -> int:
    """Writes the files of a plan under `definitions`; returns their number.

    All are first written next to `definitions`, so that a full disk changes nothing. Then each is renamed into place,
    so that an interruption leaves no half-written Definition and running again writes what is missing.

    Raises:
        OSError: a file cannot be written or renamed.
    """
    pending = [(row.path, row.text) for row in rows if row.path is not None]
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
