"""Recorded evidence: what is refused, what it keeps, and that it is valid against its schema."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from made_up_evidence import change_run, read_lines

import flashinfer_trace
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.digests import definition_sha256
from flashinfer_trace.dataset.evidence_run import line_of
from flashinfer_trace.families import family_of
from flashinfer_trace.harness import evidence
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import private_kernel
from flashinfer_trace.harness.report import OutputSummary, PlansRun, Report
from flashinfer_trace.kernels.table import RECORDED

PROPERTIES = SimpleNamespace(name="Test GPU", major=9, minor=0)
DEFINITION = flashinfer_trace.load("rmsnorm_h512")
KERNEL = private_kernel("pytest.kernel", "pytest", lambda definition, inputs, outputs: outputs)
REPORT = Report(
    DEFINITION.name,
    "pytest.kernel",
    "cuda",
    cases=60,
    vacuous=2,
    plans=PlansRun([62], [3, 9]),
    outputs={"output": OutputSummary("why", 0.9, 1.5e-3, 0.95, 1.6e-3)},
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def header_of(path, line):
    return json.loads(proof.run_file(path.parent.parent, line["run"]).read_text())


def begin_another_recording(monkeypatch, when):
    monkeypatch.setenv("FLASHINFER_TRACE_RECORDING_STARTED", when)


def valid(name, document):
    schema = json.loads((flashinfer_trace.find_root() / "schema" / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


def test_a_recorded_run_is_valid_and_carries_the_status(tmp_path):
    path = evidence.record(tmp_path / "evidence", DEFINITION, KERNEL, REPORT)
    (line,) = read_lines(path)
    header = header_of(path, line)
    valid("evidence", [line_of(line)])
    valid("evidence_run", header)
    assert line["outputs"] == {"output": [0.95, 0.9, 1.6e-3, 1.5e-3]}
    assert line["definition"] == definition_sha256(DEFINITION)[:12]
    assert (line["kernel"], line["library"], line["vacuous_cases"]) == (KERNEL.label, "pytest", [3, 9])
    assert proof.read(tmp_path, DEFINITION).entries[0].vacuous == 2
    assert header["gpu"] == {"name": "Test GPU", "compute_capability": "9.0"}
    assert header["torch"] == torch.__version__
    assert header["libraries"].keys() >= {"hypothesis", "pytest"}
    found = proof.read(tmp_path, DEFINITION)
    kernels = {KERNEL.label: KERNEL.known}
    assert found.objections(DEFINITION, kernels) == []
    assert found.stale(DEFINITION, {KERNEL.label: short_code(KERNEL)}) == []
    newer = dataclasses.replace(DEFINITION, reference=DEFINITION.reference + "# newer\n")
    (objection,) = found.objections(newer, kernels)
    assert objection.text.startswith(f"{KERNEL.label}: the reference, name, ") and not objection.failed
    assert [p.name for p in path.parent.iterdir()] == ["rmsnorm_h512.jsonl"]


def short_code(kernel):
    return {part: one[:12] for part, one in judging_code(family_of(DEFINITION), kernel).items()}


def test_a_kernel_of_the_table_needs_no_name_of_its_library(tmp_path, monkeypatch):
    kernel = family_of(DEFINITION).kernels[0]
    monkeypatch.setattr(evidence, "_version", {kernel.library: RECORDED[kernel.library]}.get)
    path = evidence.record(tmp_path / "evidence", DEFINITION, kernel, REPORT)
    (line,) = read_lines(path)
    assert "library" not in line
    (entry,) = proof.read(tmp_path, DEFINITION).entries
    assert (entry.library, entry.version) == (kernel.library, RECORDED[kernel.library])


def test_what_is_recorded_again_differs_in_its_run_alone(tmp_path, monkeypatch):
    begin_another_recording(monkeypatch, "2026-11-22T03:04:05Z")
    (before,) = read_lines(evidence.record(tmp_path, DEFINITION, KERNEL, REPORT))
    begin_another_recording(monkeypatch, "2026-11-23T03:04:05Z")
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    (after,) = read_lines(path)
    assert {name for name in before if before[name] != after[name]} == {"run"}
    assert header_of(path, before) | {"started_at": "2026-11-23T03:04:05Z"} == header_of(path, after)


#: Records twenty kernels.
WORKER = """
import dataclasses, sys
from pathlib import Path
from test_evidence import DEFINITION, KERNEL, PROPERTIES, REPORT, evidence, torch
torch.cuda.get_device_properties = lambda device: PROPERTIES
for number in range(20):
    kernel = dataclasses.replace(KERNEL, variant=f"{sys.argv[2]}{number}")
    evidence.record(Path(sys.argv[1]), DEFINITION, kernel, REPORT)
"""


def test_parallel_workers_share_a_run_and_lose_no_line(tmp_path):
    evidence.started_at()  # before the workers
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    workers = [subprocess.Popen([*command, name], env={**os.environ, "PYTHONPATH": paths}) for name in ("a", "b")]
    assert [worker.wait() for worker in workers] == [0, 0]
    lines = read_lines(tmp_path / "rmsnorm" / "rmsnorm_h512.jsonl")
    assert len({line["kernel"] for line in lines}) == len(lines) == 40
    assert len(list((tmp_path / "runs").iterdir())) == 1


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
    assert header_of(path, read_lines(path)[0]).get("driver") == version


def test_a_second_run_replaces_the_first_and_leaves_other_kernels(tmp_path):
    other = dataclasses.replace(KERNEL, variant="fa3")
    for kernel in (KERNEL, other, KERNEL):
        path = evidence.record(tmp_path, DEFINITION, kernel, REPORT)
    assert [line["kernel"] for line in read_lines(path)] == ["pytest.kernel", "pytest.kernel[fa3]"]


def on_another_gpu(path, **changes):
    """Makes the recorded line one of another GPU, and changes its header."""
    change_run(path, lambda header: header.update(gpu={"name": "Another GPU", "compute_capability": "9.0"}, **changes))


@pytest.mark.parametrize(
    ("changes", "kept"), [({}, True), ({"harness": "0" * 12}, False), ({"libraries": {"pytest": "0.1"}}, False)]
)
def test_a_run_on_another_gpu_stays_unless_other_code_judged_it_or_it_is_of_another_release(tmp_path, changes, kept):
    on_another_gpu(evidence.record(tmp_path, DEFINITION, KERNEL, REPORT), **changes)
    path = evidence.record(tmp_path, DEFINITION, dataclasses.replace(KERNEL, variant="fa3"), REPORT)
    assert len(read_lines(path)) == 2, "a run of another kernel replaces none"
    labels = [line["kernel"] for line in read_lines(evidence.record(tmp_path, DEFINITION, KERNEL, REPORT))]
    assert labels == ["pytest.kernel"] * (1 + kept) + ["pytest.kernel[fa3]"]


def test_evidence_for_an_older_reference_is_dropped(tmp_path):
    old = dataclasses.replace(DEFINITION, reference=DEFINITION.reference + "\n# older\n")
    evidence.record(tmp_path, old, dataclasses.replace(KERNEL, variant="old"), REPORT)
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    assert [line["kernel"] for line in read_lines(path)] == ["pytest.kernel"]


def test_evidence_that_cannot_be_read_is_not_overwritten(tmp_path):
    path = evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    path.write_text("{")
    with pytest.raises(proof.EvidenceError, match="not JSON"):
        evidence.record(tmp_path, DEFINITION, KERNEL, REPORT)
    assert path.read_text() == "{"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"status": "failed"}, "failed on cuda is"),
        ({"device": "cpu"}, "on cpu is"),
        ({"cases": proof.REQUIRED_CASES - 1, "vacuous": 500}, "49 real cases are"),
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
