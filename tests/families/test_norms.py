"""Norms: tests distinguish the families that differ only by their epsilon or by what they add to the weight."""

from __future__ import annotations

import pytest
import torch
from drawn_plans import small_twin

import flashinfer_trace
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.inputs import Draws

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "names",
    [
        ("rmsnorm_h4096", "rmsnorm_h4096_eps1e6"),
        ("fused_add_rmsnorm_h4096", "fused_add_rmsnorm_h2048"),
        ("fused_add_rmsnorm_residual_out_h4096", "fused_add_rmsnorm_residual_out_h4096_eps1e5"),
        ("layernorm_h128", "layernorm_h4096_eps1e5"),
    ],
    ids=lambda names: names[0],
)
def test_the_other_epsilon_is_rejected_where_it_matters(names):
    twins = {name: small_twin(name) for name in names}
    for name, (record, definition) in twins.items():
        plan = {**record.plan_for_axes(definition, {"batch_size": 5}, Draws(0, "cpu")), "values": "tiny"}
        inputs = record.inputs(definition, plan, 3, "cpu")
        expected = record.oracle(definition, inputs)
        for other, (_, with_epsilon) in twins.items():
            outputs = reference_outputs(with_epsilon, inputs, 3)
            passed = evaluate(record.policies(), outputs, expected)["output"].passed
            assert passed == (other == name)


@pytest.mark.parametrize("name", ["gemma_rmsnorm_h3584", "gemma_fused_add_rmsnorm_h3584"])
@pytest.mark.parametrize(
    "scale",
    [lambda weight: weight, lambda weight: (1 + weight).float(), lambda weight: 1 + weight.float()],
    ids=["the weight itself", "1 + weight in bfloat16", "1 + weight in float32"],
)
def test_a_gemma_norm_scales_by_1_plus_weight_in_float32(name, scale, request):
    record, definition = small_twin(name)
    plan = {**record.plan_for_axes(definition, {"batch_size": 5}, Draws(0, "cpu")), "values": "normal"}
    inputs = record.inputs(definition, plan, 3, "cpu")
    total = inputs["hidden_states"].float() + inputs.get("residual", torch.zeros(()))
    normal = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + 1e-6)
    outputs = {"output": (normal * scale(inputs["weight"])).to(torch.bfloat16)}
    if "residual_out" in definition.outputs:
        outputs["residual_out"] = total.to(torch.bfloat16)
    passed = evaluate(record.policies(), outputs, record.oracle(definition, inputs))["output"].passed
    assert passed == ("float32" in request.node.callspec.id)


@pytest.mark.parametrize("name", ["rmsnorm_h512", "fused_add_rmsnorm_h2048", "gemma_rmsnorm_h2560", "layernorm_h128"])
def test_squares_whose_sum_overflows_float32_leave_nothing(name):
    """As docs/accuracy.md says: zeros, or the bias."""
    definition = flashinfer_trace.load(name)
    inputs = flashinfer_trace.make_inputs(definition, {"batch_size": 2}, seed=1)
    inputs["hidden_states"] = inputs["hidden_states"] * 1e20
    outputs = definition.name_outputs(definition.run(**inputs))
    left = inputs.get("bias", torch.zeros(())).to(torch.bfloat16)
    assert torch.equal(outputs["output"], left.expand_as(outputs["output"]))
