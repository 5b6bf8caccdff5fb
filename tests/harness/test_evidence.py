"""The ledger: what it refuses, what it keeps, and that it is valid against its schema."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import jsonschema
import pytest
import torch

import flashinfer_trace
from flashinfer_trace.dataset import evidence as ledger
from flashinfer_trace.families import family_of
from flashinfer_trace.harness import evidence
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import private_kernel
from flashinfer_trace.harness.verify import OutputSummary, Report

DEFINITION = flashinfer_trace.load("rmsnorm_h512")
KERNEL = private_kernel("pytest.kernel", "pytest", lambda definition, inputs, outputs: outputs)
REPORT = Report(
    DEFINITION.name,
    "pytest.kernel",
    "cuda",
    cases=60,
    vacuous=2,
    outputs={"output": OutputSummary("why", 0.9, 1.5e-3, 0.95, 1.6e-3)},
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    properties = SimpleNamespace(name="Test GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def entries(path):
    return json.loads(path.read_text())["entries"]


def test_a_recorded_run_is_valid_and_carries_the_status(tmp_path):
    path = evidence.record(tmp_path / "evidence", DEFINITION, KERNEL, REPORT)
    document = json.loads(path.read_text())
    schema = json.loads((flashinfer_trace.find_root() / "schema" / "evidence.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    (entry,) = document["entries"]
    assert entry["outputs"]["output"]["kernel_worst"] == 0.95
    assert entry["digests"]["reference"] == DEFINITION.reference_sha256
    assert entry["environment"]["gpu"] == {"name": "Test GPU", "compute_capability": "9.0"}
    assert (entry["environment"]["torch"], entry["kernel"]["label"]) == (torch.__version__, KERNEL.label)
    found = ledger.read(tmp_path, DEFINITION)
    kernels = {KERNEL.label: KERNEL.known}
    assert found.objections(DEFINITION, kernels) == []
    assert found.stale({KERNEL.label: judging_code(family_of(DEFINITION), KERNEL)}) == []
    newer = dataclasses.replace(DEFINITION, reference=DEFINITION.reference + "# newer\n")
    (objection,) = found.objections(newer, kernels)
    assert objection == (f"{KERNEL.label}: the reference has changed since this run", False)
    assert [p.name for p in path.parent.iterdir()] == ["rmsnorm_h512.json"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\n", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_the_driver_is_recorded_where_it_tells_its_version(tmp_path, monkeypatch, text, version):
    told = tmp_path / "version"
    if text is not None:
        told.write_text(text)
    monkeypatch.setattr(evidence, "DRIVER_VERSION", told)
    path = evidence.record(tmp_path / "evidence", DEFINITION, KERNEL, REPORT)
    assert entries(path)[0]["environment"].get("driver") == version


def test_evidence_in_an_older_form_is_replaced(tmp_path):
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    document = json.loads(path.read_text())
    for entry in document["entries"]:
        del entry["digests"]
        entry["kernel"]["variant"] = "older"
    path.write_text(json.dumps(document))
    evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    assert [entry["kernel"]["variant"] for entry in entries(path)] == [""]


def test_a_second_run_replaces_the_first_and_leaves_other_kernels(tmp_path):
    other = dataclasses.replace(KERNEL, variant="fa3")
    for kernel in (KERNEL, other, KERNEL):
        path = evidence.record(tmp_path, DEFINITION, kernel, REPORT)
    assert [entry["kernel"]["variant"] for entry in entries(path)] == ["", "fa3"]


def test_evidence_for_an_older_reference_is_dropped(tmp_path):
    old = dataclasses.replace(DEFINITION, reference=DEFINITION.reference + "\n# older\n")
    evidence.record(tmp_path, old, dataclasses.replace(KERNEL, variant="old"), REPORT)
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    assert [entry["kernel"]["variant"] for entry in entries(path)] == [""]


def test_evidence_that_cannot_be_read_is_not_overwritten(tmp_path):
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    path.write_text("{")
    with pytest.raises(ledger.LedgerError, match="not JSON"):
        evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    assert path.read_text() == "{"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"status": "failed"}, "failed on cuda is"),
        ({"device": "cpu"}, "on cpu is"),
        ({"cases": ledger.REQUIRED_CASES - 1, "vacuous": 500}, "49 real cases are"),
    ],
)
def test_what_is_not_evidence(tmp_path, change, word):
    with pytest.raises(ValueError, match=f"{word} not evidence"):
        evidence.record(tmp_path, DEFINITION, KERNEL, dataclasses.replace(REPORT, **change))
    assert not list(tmp_path.iterdir())


def test_nothing_is_half_written(tmp_path, monkeypatch):
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    before = path.read_text()
    broken = dataclasses.replace(REPORT, outputs={"output": OutputSummary("why", float("nan"))})
    with pytest.raises(ValueError, match="JSON compliant"):
        evidence.record(tmp_path, DEFINITION, KERNEL, broken)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
