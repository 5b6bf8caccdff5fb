""".ci/contribute runs every test that a new Definition can break."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: What reads all Definitions.
READING = re.compile(r"\bdefinitions\(|\bdefinition_paths\(|\bwhole_dataset\b")


@pytest.fixture(scope="module")
def contribute() -> ModuleType:
    loader = SourceFileLoader("contribute", str(ROOT / ".ci" / "contribute"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_every_file_that_reads_all_definitions_is_listed(contribute: ModuleType) -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    reading = {name for name, path in files.items() if READING.search(path.read_text(encoding="utf-8"))}
    run = {test.partition("::")[0] for test in contribute.DATASET_TESTS}
    assert len(reading) > 20 and "tests/test_ledger.py" in reading
    unlisted = reading - run - contribute.OTHER_TESTS.keys() - {"tests/test_contribute.py"}
    assert not unlisted, f".ci/contribute must run these, or say why new Definitions cannot break them: {unlisted}"
    assert not run & contribute.OTHER_TESTS.keys()
    assert not (run | contribute.OTHER_TESTS.keys()) - files.keys(), "they do not exist"


def test_every_listed_test_exists(contribute: ModuleType) -> None:
    for test in contribute.DATASET_TESTS:
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions or (not function and functions), test


@pytest.mark.parametrize(("ends_with", "told"), [(0, ""), (1, ""), (124, "error: pytest took over 15 minutes\n")])
def test_ci_says_that_tests_took_too_long(tmp_path: Path, ends_with: int, told: str) -> None:
    """`.ci/run` replaces the README's `pytest` by one with a limit, whose exit status 124 means that it was reached."""
    limited = next(line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("pytest() "))
    stub = tmp_path / "timeout"
    stub.write_text(f'#!/bin/sh\n[ "$*" = "900 pytest -n 2" ] || exit 9\nexit {ends_with}\n')
    stub.chmod(0o755)
    command = f'set -euo pipefail\n{limited}\nPATH="{tmp_path}:$PATH"\neval "true && pytest -n 2"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ends_with, told)
