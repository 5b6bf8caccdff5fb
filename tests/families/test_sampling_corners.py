"""Corners of the sampling families are there, and the checks of draws reject what uses its random number wrongly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drawn_plans import drawn_plans

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.sampling import wrong_draws
from flashinfer_trace.families.sampling.inputs import make_rows
from flashinfer_trace.families.sampling.rows import NEAR, SamplingOptions
from flashinfer_trace.harness.case import reference_outputs, reference_run, run_case
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare

SAMPLERS = (
    "top_k_sampling_from_probs",
    "top_p_sampling_from_probs",
    "top_k_top_p_sampling_from_probs",
    "top_k_top_p_joint_sampling_from_probs",
)
ALL = (*SAMPLERS, "min_p_sampling_from_probs", "top_k_renorm_probs", "top_p_renorm_probs")
LOADED = {name: flashinfer_trace.load(f"{name}_v128256") for name in ALL}
TWINS = {name: prepare(loaded, family_of(loaded), "cpu", full=False) for name, loaded in LOADED.items()}


def specs(name, large=False, options=None):
    """Specs of the rows of all corners: of the twin, or of the Definition itself, as on a GPU."""
    definition = (LOADED if large else TWINS)[name]
    plans = family_of(definition).corners(PlanRequest(definition, {}, large, options))
    return [spec for plan in plans for spec in plan["specs"]]


@pytest.mark.parametrize("name", [name for name in ALL if "top_k" in name])
def test_every_end_of_top_k_is_a_corner(name):
    assert {spec["top_k"] for spec in specs(name)} >= {0, 1, -1, -2, -(1 << 31), 63, 64, 65, 1 << 30}
    assert ("zipf", 63) in {(spec["row"], spec["top_k"]) for spec in specs(name)}


@pytest.mark.parametrize("name", [name for name in ALL if "top_p" in name])
def test_every_end_of_top_p_is_a_corner(name):
    assert {spec["top_p"] for spec in specs(name)} >= {0.0, 1e-7, 1.0, 1.5, "boundary", "above", "below"}


def test_sums_around_the_smallest_one_are_corners_of_references_alone():
    small = [spec["sum"] for spec in specs("top_k_renorm_probs") if spec["sum"] < 1e-7]
    assert min(small) < 1e-8 < max(small)
    assert "smallest" in {spec["row"] for spec in specs("top_k_renorm_probs")}
    exactly = make_rows("smallest", 1, 64, Draws(0, "cpu"))
    assert exactly.sum(dtype=torch.float64) == 1e-8
    assert not [spec for spec in specs("top_k_renorm_probs", large=True) if spec["sum"] < 1e-7]


@pytest.mark.parametrize("name", ALL)
def test_corners_stay_within_what_a_kernel_takes(name):
    options = SamplingOptions(lowest_k=1, highest_p=0.999, sums_to_one=True)
    found = specs(name, large=True, options=options)
    assert found
    for spec in found:
        assert spec["sum"] == 1.0
        assert spec.get("top_k", 1) >= 1
        assert isinstance(spec.get("top_p", 0.0), str) or spec.get("top_p", 0.0) <= 0.999


def test_a_kernel_that_cannot_take_cumulative_masses_is_given_none():
    """FlashInfer's radix search of top-p may drop tokens there; the reference and sgl-kernel are given such rows."""
    family = family_of(TWINS["top_p_renorm_probs"])
    kernels = {kernel.label: kernel for kernel in family.kernels}
    assert kernels.keys() >= {"flashinfer.sampling.top_p_renorm_probs", "torch.ops.sgl_kernel.top_p_renorm_probs"}
    for kernel in kernels.values():
        plans = drawn_plans(family, TWINS["top_p_renorm_probs"], kernel, count=60)
        drawn = [spec for plan in plans for spec in plan["specs"]]
        found = {spec["top_p"] for spec in (*drawn, *specs("top_p_renorm_probs", True, kernel.plan_options))}
        names = {p for p in found if isinstance(p, str)}
        assert names >= NEAR.keys(), kernel.label
        assert bool(names - NEAR.keys()) == (kernel.library != "flashinfer-python"), kernel.label
        assert len(found - names) > 3


JOINT = "top_k_top_p_joint_sampling_from_probs"
SGLANG = [kernel for kernel in family_of(TWINS[JOINT]).kernels_of(LOADED[JOINT]) if kernel.library == "sglang"]


@pytest.mark.parametrize("kernel", SGLANG, ids=lambda kernel: kernel.label)
@pytest.mark.parametrize("factor", [0.98, 1.0, 1.02])
def test_sglangs_sampler_is_rejected_if_its_p_is_two_per_cent_off(kernel, factor):
    """By a corner whose p is one per cent beyond a cumulative mass in one row, and as far short of one in another."""
    family, twin = family_of(TWINS[JOINT]), TWINS[JOINT]

    def off(definition, inputs, outputs):
        return reference_outputs(definition, {**inputs, "top_p": inputs["top_p"] * factor}, 1)

    plans = family.corners(PlanRequest(twin, kernel.limits, False, kernel.plan_options))
    (near,) = (plan for plan in plans if {spec["top_p"] for spec in plan["specs"]} & NEAR.keys())
    faulty = dataclasses.replace(kernel, call=off)
    for seed in range(5):
        result = run_case(twin, family, near, seed, "cpu", faulty)
        assert all(comparison.passed for comparison in result.reference.values())
        assert bool(result.failures) == (factor != 1.0), result.failures
        assert not result.vacuous


@pytest.mark.parametrize("kernel", SGLANG, ids=lambda kernel: kernel.label)
def test_sglangs_sampler_has_that_corner_at_real_sizes(kernel):
    found = {spec["top_p"] for spec in specs(JOINT, large=True, options=kernel.plan_options)}
    assert {p for p in found if isinstance(p, str)} == NEAR.keys()


def test_a_batch_of_one_is_a_corner():
    for name in ALL[:4]:
        twin = TWINS[name]
        plans = family_of(twin).corners(PlanRequest(twin, {}, False))
        assert any(plan["rows"] == plan["draws"] == 1 for plan in plans)


@pytest.mark.parametrize("name", ALL[:4])
def test_references_draw_exactly_as_they_say(name):
    assert wrong_draws(TWINS[name], reference_run()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("right=True", "right=False"),
        ("cumsum(dim=-1, dtype=torch.float64)\n    u =", "cumsum(dim=-1)\n    u ="),
        ("1, dtype=torch.float64, device", "1, dtype=torch.float32, device"),
        ("torch.minimum(token, last)", "token"),
        ("torch.rand(", "torch.randn("),
    ],
)
@pytest.mark.parametrize("name", ["top_k_sampling_from_probs"])
def test_what_uses_its_number_otherwise_is_rejected(name, old, new):
    twin = TWINS[name]
    changed = dataclasses.replace(twin, reference=twin.reference.replace(old, new))
    assert changed.reference != twin.reference
    try:
        lines = wrong_draws(changed, reference_run())
    except Exception as error:  # an index beyond the vocabulary
        lines = [str(error)]
    assert lines
