"""python -m tools.derive: the stages of `flashinfer-trace sync` that only a checkout has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from made_up_evidence import small_dataset

import flashinfer_trace
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset import sync as syncing
from flashinfer_trace.dataset.sync import SyncError, sync
from tools import derive

ROOT = flashinfer_trace.find_root()


def changed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert derive.main([*arguments]) == 0
    return [one["file"] for one in json.loads(capsys.readouterr().out)]


def test_stale_and_surplus_files_are_found_in_the_order_in_which_they_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    small_dataset(tmp_path, ROOT, "rmsnorm_h512")
    shutil.copytree(ROOT / "models", tmp_path / "models")
    (tmp_path / "traces").mkdir()
    for path in (ROOT / "traces").iterdir():
        (tmp_path / "traces" / path.name).symlink_to(path)
    needs = tmp_path / "models" / "needs" / "qwen3-8b.json"
    surplus = needs.with_name("model-of-yesterday.json")
    surplus.write_bytes(needs.read_bytes())
    calls = tmp_path / "models" / "recorded" / "rmsnorm_h512.json"
    assert changed(capsys)[-1].startswith("models/recorded/") and not surplus.exists()
    assert changed(capsys) == changed(capsys, "--check") == []
    before = {path: path.read_bytes() for path in (needs, calls)}
    for path, text in before.items():
        path.write_bytes(text + b"\n")
    assert changed(capsys, "--check") == ["models/needs/qwen3-8b.json"], "what follows from it is not judged"
    assert needs.read_bytes() != before[needs]
    assert changed(capsys) == ["models/needs/qwen3-8b.json", "models/recorded/rmsnorm_h512.json"]
    assert {path: path.read_bytes() for path in before} == before


def test_only_the_checkout_whose_code_runs_has_these_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset of somebody else brings no program that runs."""
    small_dataset(tmp_path, ROOT, "rmsnorm_h512")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").write_text("")
    (tmp_path / "tools" / "derive.py").write_text("open('ran', 'w')\nprint('[]')\n")
    assert sync(tmp_path, write=False) == [] and not (tmp_path / "ran").exists()
    assert store.PACKAGE.parent == ROOT
    monkeypatch.setattr(syncing, "PACKAGE", tmp_path / "flashinfer_trace")
    assert sync(tmp_path, write=False) == [] and (tmp_path / "ran").exists()
    (tmp_path / "tools" / "derive.py").write_text("import sys\nsys.exit('models/x.json: line 1: not JSON')\n")
    with pytest.raises(SyncError, match=r"^models/x\.json: line 1: not JSON$"):
        sync(tmp_path, write=True)
    (tmp_path / "tools" / "derive.py").write_text('print(\'[{"file": "schema/x.json", "change": "derived data"}]\')')
    monkeypatch.setattr(syncing, "sync_definitions", lambda *_: pytest.fail("Definitions follow from stale data"))
    assert sync(tmp_path, write=False) == [(tmp_path / "schema" / "x.json", "derived data")]
