"""The mixture of experts: its routing rules, its inputs, its error models, and the adapter of sgl-kernel's pipeline.

Here the adapter calls emulations of the kernels: each reproduces in torch what was measured of the real kernel, with
its roundings, its unwritten slots and its poisoned outputs.
"""

from __future__ import annotations

import sys

import pytest
import torch
from moe_cases import measured_over_modeled_gain

from flashinfer_trace import load
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe.deepseek import decidable
from flashinfer_trace.families.moe.oracle import route
from flashinfer_trace.harness.case import kernel_outputs, poisoned_outputs, reference_outputs, vacuity
from flashinfer_trace.harness.power import power, unexplained
from flashinfer_trace.harness.verify import Job
from flashinfer_trace.verdict.wrong_outputs import MUTANTS

REAL = load("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048")
FAMILY = family_of(REAL)
TWIN = REAL.with_const_axes(FAMILY.twin)
PIPELINE, ONE_GROUP, SINGLE_CALL = FAMILY.kernels
PLAN = {
    "seq_len": 64,
    "routing": "random",
    "bias": "small",
    "values": "normal",
    "zero_row": False,
    "rank": 1,
    "factor": 2.5,
    "ties": True,
}
POLICIES = {
    "reference": FAMILY.compare["output"],
    "pipeline": PIPELINE.compare["output"],
    "single call": SINGLE_CALL.compare["output"],
}


def case(seed=0, **changes):
    """Inputs of the twin and what its output must be."""
    inputs = FAMILY.inputs(TWIN, {**PLAN, **changes}, seed, "cpu")
    return inputs, FAMILY.oracle(TWIN, inputs)["output"]


# The reference


def test_equal_scores_choose_the_lower_groups_and_experts():
    inputs, _ = case(seq_len=1)
    inputs["routing_logits"] = torch.zeros(1, 32)
    inputs["routing_bias"] = torch.zeros(32, dtype=torch.bfloat16)
    chosen = route(TWIN, inputs)[0].nonzero().flatten().tolist()
    assert chosen == list(range(8))
    for rank, empty in ((0, False), (1, True)):
        inputs["local_expert_offset"] = rank * 8
        assert bool((TWIN.run(**inputs) == 0).all()) is empty


def test_routing_by_hand():
    """Group 7 is kept for its two best together, not for its best; the bias affects choices, but not weights."""
    inputs, _ = case(seq_len=1)
    logits, bias = torch.full((32,), -6.0), torch.zeros(32)
    logits[[0, 1, 4, 5, 8, 9, 28, 29]] = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    logits[12] = 3.0  # alone in its group: 0.95 + 0.002 is less than 0.60 + 0.57
    logits[[16, 17]] = -2.0
    bias[[16, 17]] = 4.0
    inputs["routing_logits"], inputs["routing_bias"] = logits.unsqueeze(0), bias.to(torch.bfloat16)
    weights = route(TWIN, inputs)[0]
    expected = [0, 1, 4, 5, 8, 9, 16, 17]
    assert weights.nonzero().flatten().tolist() == expected
    scores = torch.sigmoid(logits.double()[expected])
    torch.testing.assert_close(weights[expected], scores / scores.sum() * 2.5)


def test_a_token_without_local_experts_and_no_tokens():
    inputs, expected = case(routing="elsewhere", seq_len=3)
    assert bool((TWIN.run(**inputs) == 0).all())
    assert vacuity(TWIN, {"output": expected}, FAMILY.policies(PIPELINE))
    assert TWIN.run(**case(seq_len=0)[0]).shape == (0, 512)


def test_the_reference_dequantizes_one_expert_at_a_time():
    inputs, _ = case()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest = max(largest, result.numel())
            return result

    with Watch():
        TWIN.run(**inputs)
    assert largest <= max(inputs["gemm1_weights"][0].numel(), inputs["hidden_states"].numel())


# Inputs


def test_inputs_repeat_and_routings_do_what_they_say():
    for routing, (low, high) in {"local": (8, 8), "one_expert": (1, 1), "elsewhere": (0, 0)}.items():
        for bias in ("zero", "small", "large"):
            inputs, _ = case(routing=routing, bias=bias, seq_len=20)
            here = (route(TWIN, inputs)[:, 8:16] > 0).sum(dim=1)
            assert low <= int(here.min()) <= int(here.max()) <= high
    first, second = case(seed=3)[0], case(seed=3)[0]
    assert all(torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8)) for n in first if n[0] in "gh")


def test_only_decidable_rows_are_kept():
    bias = torch.zeros(32)
    clear = torch.linspace(-3, 3, 32)
    tied = torch.where(clear > 2, 2.0, clear)
    close = clear.clone()
    order = close.argsort(descending=True)
    close[order[8]] = close[order[7]] - 1e-6
    verdicts = decidable(TWIN, torch.stack([clear, tied, torch.zeros(32), close]), bias)
    assert verdicts.tolist() == [True, True, True, False]
    for changes in ({}, {"routing": "ties"}, {"bias": "large"}):
        inputs, _ = case(**changes)
        assert decidable(TWIN, inputs["routing_logits"], inputs["routing_bias"]).all()


# Error models


@pytest.mark.parametrize("values", ["normal", "large", "tiny"])
@pytest.mark.parametrize("routing", ["random", "local", "ties", "one_expert"])
def test_the_pipeline_is_within_its_bound(sgl_kernel, routing, values):
    for seed, count in enumerate((1, 5, 64)):
        inputs, expected = case(seed, routing=routing, values=values, seq_len=count, zero_row=True, bias="large")
        outputs, failures = kernel_outputs(TWIN, PIPELINE, inputs)
        assert not failures
        comparison = POLICIES["pipeline"].compare(outputs["output"], expected)
        assert comparison.passed, comparison
        # The bound models the errors and is not just wide: a good part of it is used (of 8 deviations, 5 occur).
        assert count < 64 or comparison.ratio > 0.3, comparison
        assert POLICIES["single call"].compare(outputs["output"], expected).passed


@pytest.mark.parametrize("routing", ["random", "elsewhere"])
def test_the_pipeline_leaves_zeros_where_no_expert_is_local(sgl_kernel, routing):
    inputs, expected = case(routing=routing)
    outputs, _ = kernel_outputs(TWIN, PIPELINE, inputs)
    without = (expected.value == 0).all(dim=1)
    assert without.any()
    assert bool((outputs["output"][without] == 0).all())


def wrong_half(inputs):
    size = TWIN.const_axes["intermediate_size"]
    inputs["gemm1_weights"] = inputs["gemm1_weights"].view(torch.uint8).roll(size, 1).view(torch.float8_e4m3fn)
    inputs["gemm1_weights_scale"] = inputs["gemm1_weights_scale"].roll(size // 128, 1)


def no_factor(inputs):
    inputs["routed_scaling_factor"] = 1.0


def offset_off_by_one(inputs):
    inputs["local_expert_offset"] -= 1


def transposed_scales(inputs):
    scale = inputs["gemm1_weights_scale"]
    inputs["gemm1_weights_scale"] = scale.transpose(1, 2).contiguous().view(scale.shape)


def token_scales_misread(inputs):
    scale = inputs["hidden_states_scale"]
    inputs["hidden_states_scale"] = scale.T.contiguous().view(scale.shape)


def scales_of_the_next_expert(inputs):
    inputs["gemm2_weights_scale"] = inputs["gemm2_weights_scale"].roll(1, 0)


WRONG_INPUTS = [
    wrong_half,
    no_factor,
    offset_off_by_one,
    transposed_scales,
    token_scales_misread,
    scales_of_the_next_expert,
]


@pytest.mark.parametrize("mistake", WRONG_INPUTS, ids=lambda mistake: mistake.__name__)
def test_a_wrong_pipeline_is_rejected(sgl_kernel, mistake):
    inputs, expected = case()
    mistake(inputs)
    outputs = PIPELINE.call(TWIN, inputs, poisoned_outputs(TWIN, inputs, 0))["output"]
    reference = TWIN.run(**inputs)
    for name, policy in POLICIES.items():
        assert not policy.compare(outputs, expected).passed, name
        assert not policy.compare(reference, expected).passed, name


def test_weights_with_bias_are_rejected(sgl_kernel, monkeypatch):
    router = sys.modules["sglang.kernels.ops.moe.moe_fused_gate"]
    gate = router.moe_fused_gate

    def biased_gate(logits, bias, *arguments, **keywords):
        weights, ids = gate(logits, bias, *arguments, **keywords)
        chosen = torch.sigmoid(logits).gather(1, ids.long()) + bias[ids.long()]
        return chosen / chosen.sum(1, keepdim=True) * weights.sum(1, keepdim=True), ids

    monkeypatch.setattr(router, "moe_fused_gate", biased_gate)
    inputs, expected = case(bias="large")
    outputs = PIPELINE.call(TWIN, inputs, poisoned_outputs(TWIN, inputs, 0))["output"]
    for name, policy in POLICIES.items():
        assert not policy.compare(outputs, expected).passed, name


@pytest.mark.parametrize("policy", POLICIES)
def test_mutants_are_rejected(sgl_kernel, policy):
    """Mutants of the reference's output and of the pipeline's output."""
    inputs, expected = case(routing="local")
    other, _ = case(seed=1, routing="local")
    pairs = {
        "reference": [reference_outputs(TWIN, given, 0)["output"] for given in (inputs, other)],
        "pipeline": [kernel_outputs(TWIN, PIPELINE, given)[0]["output"] for given in (inputs, other)],
    }
    for name, (output, stale) in pairs.items():
        if policy != "reference" or name == "reference":
            assert POLICIES[policy].compare(output, expected).passed, name
        for mutant in MUTANTS:
            mutated = mutant.applied(output, stale)
            assert mutated is not None
            assert not POLICIES[policy].compare(mutated, expected).passed, (name, mutant.name)


def test_the_gain_of_a_case_is_told_apart_from_its_rounding_noise(sgl_kernel):
    """Over many seeds, the deviation of the scale that the pipeline's roundings cause is about the modeled one."""
    cases = [case(seed, routing="local", seq_len=8) for seed in range(16)]
    assert 0.5 < measured_over_modeled_gain(TWIN, PIPELINE, cases) < 1.5


def test_a_verification_rejects_the_pipeline_with_faults(sgl_kernel):
    """On the emulated kernels: what is lost in a faulty step is not hidden by the roundings of the others."""
    found = power(Job(REAL, FAMILY, PIPELINE), 3)
    assert not unexplained(FAMILY, found)
    seen = {name for name, fault in found.items() if fault.cases is not None}
    assert {"two experts exchanged", "output: a stale row", "output: two rows exchanged"} <= seen
