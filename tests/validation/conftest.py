"""Datasets in temporary directories, made from fixtures or by small edits of a valid Definition."""

from __future__ import annotations

import copy
import fnmatch
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel_table import change_kernels

from flashinfer_trace.dataset.store import definition_paths
from flashinfer_trace.dataset.validation import Problem, validate_paths
from flashinfer_trace.format.naming import family_name, load_naming

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "schema" / "tests"


def read_fixture(path: Path) -> dict[str, Any]:
    """One file of schema/tests."""
    fixture: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fixture


MINIMAL = read_fixture(FIXTURES / "valid" / "minimal.json")["definition"]


class Dataset:
    """A dataset root with the real schema/, and whatever a test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "definitions").mkdir(parents=True)
        shutil.copytree(REPOSITORY / "schema", root / "schema", ignore=shutil.ignore_patterns("tests"))

    def write(self, relative: str, content: Any) -> Path:
        """Writes one file: bytes, text, or anything else as JSON."""
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            # newline="" preserves the line ends of a fixture.
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(content if isinstance(content, str) else json.dumps(content, indent=2))
        return path

    def add(self, definition: dict[str, Any], source: str | None = None) -> Path:
        """Writes a Definition to its proper place, and its reference as the source of its family."""
        self.write_source(definition, source)
        return self.write(f"definitions/{definition['op_type']}/{definition['name']}.json", definition)

    def write_source(self, definition: dict[str, Any], source: str | None = None) -> None:
        """Writes a source under reference/ that renders to what the Definition embeds."""
        family = family_name(definition, load_naming(self.root))
        if family and isinstance(definition.get("reference"), str):
            self.write(f"reference/{definition['op_type']}/{family}.py", source or definition["reference"])

    def problems(self, *paths: Path) -> list[Problem]:
        """Problems that the validator finds in these paths, by default in everything."""
        return validate_paths(list(paths) or [self.root], self.root).problems


def drop_other_claims(root: Path) -> None:
    """Removes what models/curated/claims.json says of Definitions that a copy with a few of them does not have."""
    path, names = root / "models" / "curated" / "claims.json", [one.stem for one in definition_paths(root)]
    document = json.loads(path.read_text(encoding="utf-8"))
    for claim in document["claims"]:
        claim["definitions"] = [one for one in claim["definitions"] if fnmatch.filter(names, one)]
    document["claims"] = [claim for claim in document["claims"] if claim["definitions"]]
    path.write_text(json.dumps(document, indent=2), encoding="utf-8")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    """In which the family rmsnorm has one kernel, as the fixtures say."""
    change_kernels(monkeypatch, "rmsnorm", lambda kernels: [one for one in kernels if one.library != "sglang-kernel"])
    yield Dataset(tmp_path / "dataset")


@pytest.fixture
def minimal() -> dict[str, Any]:
    """A copy of the smallest valid Definition, for a test to change."""
    return copy.deepcopy(MINIMAL)


@pytest.fixture
def rules_after(dataset: Dataset, minimal: dict[str, Any]) -> Callable[[Callable[[dict[str, Any]], object]], list[str]]:
    """Changes the smallest Definition and returns the rules that it then breaks."""

    def check(change: Callable[[dict[str, Any]], object]) -> list[str]:
        change(minimal)
        return [problem.rule for problem in dataset.problems(dataset.add(minimal))]

    return check
