"""The scale of the logits: cases have several, and a kernel that has the usual one built in is refused."""

from __future__ import annotations

import dataclasses

import pytest
from drawn_plans import drawn_plans
from whole_dataset import FAMILIES, MEMBERS

from flashinfer_trace.families.attention.cases import SCALES, softmax_scale
from flashinfer_trace.families.mla_paged.inputs import SCALED_DIM
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, prepare, verify

USUAL = SCALES[0]
FAULT = "sm_scale replaced by its usual value"
ATTENTION = [name for name, members in MEMBERS.items() if "sm_scale" in members[0].inputs]


def twin(name):
    """(family, twin of its first Definition)."""
    family, definition = FAMILIES[name], MEMBERS[name][0]
    return family, prepare(definition, family, "cpu", full=False)


def usual_scale(definition):
    """The scale of the twin's features, or of those before absorption."""
    latent = "head_dim_ckv" in definition.const_axes
    dim = definition.const_axes.get("qk_dim", definition.const_axes.get("head_dim", 0))
    return softmax_scale(SCALED_DIM if latent else dim)


def test_every_family_whose_kernels_take_a_scale_is_looked_at():
    assert len(ATTENTION) >= 20
    assert {MEMBERS[name][0].op_type for name in ATTENTION} == {
        "dsa_paged",
        "gqa_paged",
        "gqa_ragged",
        "mla_paged",
        "mla_ragged",
    }


@pytest.mark.parametrize("name", ATTENTION)
def test_cases_have_several_scales_and_corners_an_unusual_one(name):
    family, definition = twin(name)
    assert {plan["scale"] for plan in drawn_plans(family, definition)} == set(SCALES)
    for large in (False, True):
        corners = family.corners(PlanRequest(definition, {}, large))
        assert {plan["scale"] for plan in corners} - {USUAL}
    served = family.plan_for_axes(definition, {}, Draws(0, "cpu"))
    usual = usual_scale(definition)
    for scale in SCALES:
        given = family.inputs(definition, {**served, "scale": scale}, 3, "cpu")["sm_scale"]
        assert given == pytest.approx(usual * scale, rel=2**-23)
    assert served["scale"] == USUAL and family.inputs(definition, served, 3, "cpu")["sm_scale"] == usual


@pytest.mark.parametrize("name", ATTENTION)
def test_a_kernel_that_has_the_usual_scale_built_in_is_refused(name):
    family, definition = twin(name)
    usual = usual_scale(definition)

    def call(definition, inputs, outputs):
        return reference_outputs(definition, {**inputs, "sm_scale": usual}, 0)

    kernel = dataclasses.replace(stand_in(None), call=call)
    job = Job(MEMBERS[name][0], family, kernel)
    assert verify(job, examples=0).status == "failed"
    assert FAULT in {fault.name for fault in family.faults}  # test_mutants looks for it
