"""Each distinct small twin is verified once, and nothing that a case depends on is taken for the same.

Errors that a small twin cannot show are seen at the Definition's own sizes.
"""

from __future__ import annotations

import dataclasses

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness import twins
from flashinfer_trace.harness.twins import REAL_CORNERS, Twins, has_real_size, twin_key, with_real_size
from flashinfer_trace.harness.verify import Job, Report, verify

FIRST = flashinfer_trace.load("rmsnorm_h7168")
FAMILY = family_of(FIRST)


@pytest.fixture
def counted(monkeypatch):
    """Names of the Definitions whose cases at the sizes of the twin were really run."""
    ran = []

    def verify(job, **options):
        if not job.full:
            ran.append(job.definition.name)
        return twins_verify(job, **options)

    twins_verify = twins.verify
    monkeypatch.setattr(twins, "verify", verify)
    return ran


def test_another_size_of_a_family_shares_the_cases(counted):
    memory = Twins()
    first = memory.verify(Job(FIRST, FAMILY), examples=3, seed=4)
    second = memory.verify(Job(flashinfer_trace.load("rmsnorm_h512"), FAMILY), examples=3, seed=4)
    assert counted == ["rmsnorm_h7168"]
    assert (first.twin_of, second.twin_of) == ("", "rmsnorm_h7168")
    corners = len(Job(FIRST, FAMILY, full=True).corners[:REAL_CORNERS])
    assert corners
    assert (first.real_size, second.real_size) == (1 + corners, 1), "corners are run at the first one's own sizes alone"
    same = dataclasses.replace(first, definition="rmsnorm_h512", twin_of="rmsnorm_h7168", seconds=second.seconds)
    same.real_size = second.real_size
    assert second == same


def test_other_examples_or_another_seed_are_run(counted):
    memory = Twins()
    for examples, seed in ((3, 4), (4, 4), (3, 5), (3, 4)):
        assert memory.verify(Job(FIRST, FAMILY), examples=examples, seed=seed).status == "passed"
    assert len(counted) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"reference": FIRST.reference.replace("EPS = 1e-6", "EPS = 1e-5")},
        {"constraints": ("batch_size >= 1",)},
        {"inputs": {**FIRST.inputs, "weight": dataclasses.replace(FIRST.inputs["weight"], dtype="float16")}},
        {"axes": {**FIRST.axes, "extra": dataclasses.replace(FIRST.axes["hidden_size"], name="extra")}},
    ],
    ids=["reference", "constraints", "dtype", "axes"],
)
def test_what_a_case_depends_on_makes_another_twin(change):
    assert twin_key(Job(dataclasses.replace(FIRST, **change), FAMILY)) != twin_key(Job(FIRST, FAMILY))


def test_descriptions_and_tags_do_not():
    axes = {name: dataclasses.replace(axis, description="Something else.") for name, axis in FIRST.axes.items()}
    other = dataclasses.replace(FIRST, name="rmsnorm_h8", description="Another.", tags=("tp:2",), axes=axes)
    assert twin_key(Job(other, FAMILY)) == twin_key(Job(FIRST, FAMILY))


def test_a_failure_fails_every_size_with_the_line_that_repeats_it():
    wrong = FIRST.reference.replace("mul_(weight)", "mul_(weight * 1.01)")
    memory = Twins()
    for name in ("rmsnorm_h7168", "rmsnorm_h512"):
        definition = dataclasses.replace(flashinfer_trace.load(name), reference=wrong)
        report = memory.verify(Job(definition, FAMILY), examples=3, seed=4)
        assert (report.definition, report.status) == (name, "failed")
        assert "repeat: flashinfer-trace verify rmsnorm_h7168 --against oracle" in report.message


def test_a_part_of_a_large_row_is_seen_at_the_definitions_own_sizes():
    """It is right at every size up to 4096, and so in the small twin."""
    partial = dataclasses.replace(
        FIRST, reference=FIRST.reference.replace("vector_norm(x,", "vector_norm(x[:, :4096],")
    )
    assert partial.reference != FIRST.reference
    assert verify(Job(partial, FAMILY), examples=3, seed=4).status == "passed"
    memory = Twins()
    report = memory.verify(Job(partial, FAMILY), examples=3, seed=4)
    assert report.status == "failed"
    assert "repeat: flashinfer-trace verify rmsnorm_h7168 --against oracle --device cpu --full --plan" in report.message
    smaller = flashinfer_trace.load("rmsnorm_h512")
    smaller = dataclasses.replace(smaller, reference=partial.reference.replace("7168", "512"))
    found = memory.verify(Job(smaller, FAMILY), examples=3, seed=4)
    assert (found.status, found.twin_of) == ("passed", "rmsnorm_h7168")


def test_corners_are_run_at_the_own_sizes_of_the_first_definition_that_is_small_enough():
    """Here one is wrong in a corner only, and only at sizes that the twin does not have."""
    huge = "torch.where(hidden_states.abs().amax() > 1e4, 1.01, 1.0) if hidden_states.shape[1] > 4096 else 1.0"
    wrong = dataclasses.replace(FIRST, reference=FIRST.reference.replace("mul_(weight)", f"mul_(weight * ({huge}))"))
    assert wrong.reference != FIRST.reference
    report = Report(wrong.name, "oracle", "cpu")
    assert with_real_size(Job(wrong, FAMILY), report, corners=False).status == "passed"
    assert Twins().verify(Job(wrong, FAMILY), examples=3, seed=4).status == "failed"


def test_large_definitions_have_no_case_at_their_own_sizes():
    large = flashinfer_trace.load("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048")
    assert not has_real_size(large)
    assert has_real_size(FIRST)
    job = Job(large, family_of(large))
    report = Report(large.name, "oracle", "cpu")
    assert with_real_size(job, report, corners=True) is report
