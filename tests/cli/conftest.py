"""Runs the command line in this process, on a small dataset that tests may damage."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

import flashinfer_trace
from flashinfer_trace.cli import main


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


@pytest.fixture
def copy_of_dataset(tmp_path, monkeypatch):
    """A dataset with one Definition that tests may damage."""
    root = flashinfer_trace.find_root()
    for name in ("schema", "reference"):
        shutil.copytree(root / name, tmp_path / name)
    (tmp_path / "evidence").mkdir()
    target = tmp_path / "definitions" / "rmsnorm" / "rmsnorm_h512.json"
    target.parent.mkdir(parents=True)
    shutil.copy(root / "definitions" / "rmsnorm" / "rmsnorm_h512.json", target)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    return target


@pytest.fixture
def change(copy_of_dataset):
    """Replaces a text in the embedded reference of the copied Definition, and in its source."""

    def replace(old: str, new: str, source_too: bool = True) -> None:
        data = json.loads(copy_of_dataset.read_text())
        assert old in data["reference"]
        data["reference"] = data["reference"].replace(old, new)
        copy_of_dataset.write_text(json.dumps(data, indent=2))
        if source_too:
            source = copy_of_dataset.parents[2] / "reference" / "rmsnorm" / "rmsnorm.py"
            source.write_text(source.read_text().replace(old, new))

    return replace
