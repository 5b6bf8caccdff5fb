"""The committed evidence and documents: complete for the Hopper kernels, and up to date."""

from __future__ import annotations

import json

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from tools import generate_docs

HOPPER = (9, 0)
REQUIRED_CASES = 50
DEFINITIONS = {definition.name: definition for definition in flashinfer_trace.definitions()}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_verified_means_every_kernel_that_hopper_runs(name):
    definition = DEFINITIONS[name]
    family = family_of(definition)
    runnable = {k.label for k in family.kernels_of(definition) if k.unavailable(HOPPER) is None}
    recorded = {}
    for entry in generate_docs.entries(flashinfer_trace.find_root(), definition):
        kernel = entry["kernel"]
        recorded[f"{kernel['path']}[{kernel['variant']}]" if kernel["variant"] else kernel["path"]] = entry
    if "verified" in definition.tag_values("status"):
        assert runnable <= set(recorded), f"no evidence of {runnable - set(recorded)}"
    else:
        assert not recorded or not runnable <= set(recorded)
        assert family.unverified, "an unverified Definition needs the reason in its family's record"
    for label, entry in recorded.items():
        assert entry["cases"] >= REQUIRED_CASES, f"{label}: {entry['cases']} cases"
        assert all(output["kernel_worst"] <= 1 for output in entry["outputs"].values())


def test_documents_are_up_to_date():
    assert generate_docs.main(["--check"]) == 0


def test_stale_documents_are_noticed(tmp_path, monkeypatch, capsys):
    root = flashinfer_trace.find_root()
    for name in ("definitions", "schema", "reference", "evidence"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "traces").mkdir()
    for name in ("kernel_traces.json", "op_traces.json"):
        (tmp_path / "traces" / name).symlink_to(root / "traces" / name)
    monkeypatch.setenv("FLASHINFER_TRACE_ROOT", str(tmp_path))
    assert generate_docs.main(["--check"]) == 1
    assert generate_docs.main([]) == 0
    assert generate_docs.main(["--check"]) == 0
    first = next(iter((root / "evidence").glob("*/*.json")))
    ledger = json.loads(first.read_text())
    assert f"`{ledger['definition']}`" in (tmp_path / "docs" / "verification.md").read_text()
