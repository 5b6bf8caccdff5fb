"""Checks of references besides their outputs; none of them runs a reference without its worker."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import flashinfer_trace
from flashinfer_trace import families
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.report import Report
from flashinfer_trace.harness.verify import CaseFailure, Job, _Cases, _Target, verify
from flashinfer_trace.sandbox.worker import ReferenceLimits, ReferenceWorker

LOADED = flashinfer_trace.load("rmsnorm_h512")
FAMILY = family_of(LOADED)
FAMILY_FILES = sorted(Path(families.__path__[0]).rglob("*.py"))


def test_the_checks_of_a_family_run_references_in_the_worker():
    hangs = "import torch\n\n\ndef run(hidden_states, weight):\n    while hidden_states.shape[0] == 5:\n        pass\n"
    hanging = dataclasses.replace(LOADED, reference=hangs)

    def check(definition, run):
        rows = {"hidden_states": torch.zeros(5, 64).bfloat16(), "weight": torch.zeros(64).bfloat16()}
        worker.limits = ReferenceLimits(seconds=1.0)
        return [str(run(hanging, rows))]

    with ReferenceWorker() as worker:
        report = verify(Job(LOADED, dataclasses.replace(FAMILY, checks=(check,)), worker=worker), examples=4)
    assert (report.status, report.message) == (
        "failed",
        "ReferenceFailed: the reference did not answer within 1 s [timed-out]",
    )


@pytest.mark.parametrize("family", FAMILY_FILES, ids=lambda path: path.stem)
def test_no_record_runs_a_reference_itself(family):
    """It would run in the process of the harness, without the limits of a worker."""
    names = {node.attr for node in ast.walk(ast.parse(family.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"compiled", "run_reference"}


def test_what_passes_after_a_failure_does_not_count():
    """hypothesis shrinks the failing case by running many others, and then that one again, if cases are missing."""
    wrong = LOADED.reference.replace("x.mul_(", "x.mul_(1.5 if hidden_states.shape[0] > 20 else 1.0).mul_(")
    assert wrong != LOADED.reference
    (target,) = targets = [_Target(Job(dataclasses.replace(LOADED, reference=wrong), FAMILY), Report("", "", "cpu", 0))]
    cases, plan = _Cases(target.job, targets, 0, None), {"batch_size": 4, "values": "normal", "zero_row": False}
    cases._examples = 2
    target.report.plans.counts.append(0)  # a round
    assert cases.run(plan, 0) and cases.missing == 1
    for seed in (1, 2):
        with pytest.raises(CaseFailure):
            cases.run({**plan, "batch_size": 21}, seed)
        assert cases.run(plan, seed) and cases.missing == 1
