"""Softmax routing, alone and with experts: its rules, inputs and error models, and the adapters on emulated kernels."""

from __future__ import annotations

import math

import pytest
import torch
from drawn_plans import drawn_plans
from moe_cases import fitted_gain, measured_over_modeled_gain

from flashinfer_trace import definitions, load
from flashinfer_trace.families import family_of
from flashinfer_trace.families.moe import oracle
from flashinfer_trace.families.moe.oracle import softmax_route
from flashinfer_trace.families.moe.softmax import decidable
from flashinfer_trace.harness.case import kernel_outputs, poisoned_outputs, run_case, vacuity

ROUTER = load("moe_topk_softmax_topk8_e128")
ROUTER_FAMILY = family_of(ROUTER)
BF16 = load("moe_bf16_softmax_routing_topk8_e16_h2048_i768")
FP8 = load("moe_fp8_block_scale_softmax_routing_topk8_e16_h2048_i768")
TWINS = {
    name: definition.with_const_axes(family_of(definition).twin)
    for name, definition in {"bf16": BF16, "fp8": FP8}.items()
}
#: All experts on one rank (tensor parallelism), one expert per rank, and four ranks of eight experts.
LAYOUTS = {
    "whole": {"num_experts": 16, "num_local_experts": 16, "top_k": 8},
    "single": {"num_experts": 8, "num_local_experts": 1, "top_k": 2},
    "ranks": {"num_experts": 32, "num_local_experts": 8, "top_k": 8},
}
PLAN = {"seq_len": 64, "routing": "random", "values": "normal", "zero_row": False, "rank": 0, "norm": True}
EVERY_FORMAT = pytest.mark.parametrize("name", TWINS)


def case(twin, seed=0, **changes):
    """The inputs, and the expected output."""
    family = family_of(twin)
    inputs = family.inputs(twin, {**PLAN, **changes}, seed, "cpu")
    return inputs, family.oracle(twin, inputs)["output"]


@pytest.mark.parametrize("routing", ["random", "local", "one_expert", "elsewhere"])
@EVERY_FORMAT
def test_experts_computed_together_come_out_as_one_by_one(name, routing, monkeypatch):
    found = {}
    for kind, elements in (("together", 2**40), ("alone", 0)):
        monkeypatch.setitem(oracle.BATCH_ELEMENTS, "cpu", elements)
        found[kind] = case(TWINS[name], routing=routing, zero_row=True)[1]
    together, alone = found.values()
    torch.testing.assert_close(together.value, alone.value, rtol=1e-11, atol=1e-13)
    for part, value in alone.parts.items():
        # Variances are sums of squares that were multiplied in float32.
        torch.testing.assert_close(together.parts[part], value, rtol=1e-6, atol=1e-9 * float(value.abs().max()))


# Routing


def routed(definition, logits, norm):
    inputs = {"routing_logits": torch.tensor([logits], dtype=torch.bfloat16), "norm_topk_prob": norm}
    weights, ids = definition.run(**inputs)
    return weights[0].tolist(), ids[0].tolist(), softmax_route(definition, inputs)[0]


def test_routing_by_hand():
    small = load("moe_topk_softmax_topk2_e8")
    odds = [1, 4, 2, 0.5, 4, 1, 1, 0.5]  # 14 together
    for norm, expected in ((True, [0.5, 0.5]), (False, [4 / 14, 4 / 14])):
        # The logarithms of powers of two are not bfloat16 numbers; the tolerance allows for their rounding, 2^-9.
        weights, ids, exact = routed(small, [math.log(odd) for odd in odds], norm)
        assert ids == [1, 4]
        assert weights == pytest.approx(expected, rel=2.0**-7)
        assert exact.nonzero().flatten().tolist() == [1, 4]
        assert exact[[1, 4]].tolist() == pytest.approx(weights, rel=1e-7)


def test_equal_logits_choose_the_lower_experts_in_order():
    weights, ids, _ = routed(ROUTER, [0.25] * 128, False)
    assert ids == list(range(8))
    assert weights == [1 / 128] * 8
    logits = [0.0] * 128
    logits[100] = logits[3] = 1.0
    assert routed(ROUTER, logits, True)[1] == [3, 100, 0, 1, 2, 4, 5, 6]


def test_weights_add_up_to_one_only_if_renormalized():
    for norm in (True, False):
        plan = {"seq_len": 50, "routing": "random", "rank": 0, "norm": norm}
        inputs = ROUTER_FAMILY.inputs(ROUTER, plan, 0, "cpu")
        totals = ROUTER.run(**inputs)[0].double().sum(1)
        assert bool(((totals - 1).abs() < 1e-6).all()) is norm
        assert bool((totals < 1 + 1e-6).all())


def test_only_decidable_rows_are_kept():
    clear = torch.linspace(-3, 3, 32)
    order = clear.argsort(descending=True)
    close, swapped, far = clear.clone(), clear.clone(), clear.clone()
    close[order[8]] = close[order[7]] - 1e-6
    swapped[order[1]] = swapped[order[0]] - 1e-6
    far[order[0]] = 100
    refused = clear.clone()
    refused[order[9]] = refused[order[10]] + 1e-6
    rows = torch.stack([clear, torch.zeros(32), close, swapped, far, refused])
    assert decidable(rows, 8).tolist() == [True, True, False, False, False, True]
    for routing in ("random", "peaked", "ties", "one_expert", "equal"):
        inputs = ROUTER_FAMILY.inputs(ROUTER, {"seq_len": 99, "routing": routing, "rank": 5, "norm": True}, 1, "cpu")
        assert decidable(inputs["routing_logits"], 8).all()


# The router's kernel


def reversed_ties(logits, weights, ids):
    order = torch.softmax(logits.float(), 1).flip(1).argsort(dim=1, descending=True, stable=True)[:, :8]
    ids.copy_(logits.shape[1] - 1 - order)


def next_expert(logits, weights, ids):
    ids.add_(1).remainder_(logits.shape[1])


def worst_first(logits, weights, ids):
    weights.copy_(weights.flip(1))
    ids.copy_(ids.flip(1))


def not_renormalized(logits, weights, ids):
    weights.copy_(torch.softmax(logits.float(), 1).gather(1, ids.long()))


def bf16_weights(logits, weights, ids):
    weights.copy_(weights.to(torch.bfloat16))


@pytest.mark.parametrize("routing", ["random", "peaked", "ties", "one_expert", "equal"])
def test_the_router_kernel_is_within_its_bound(sgl_kernel, routing):
    kernel = ROUTER_FAMILY.kernels[0]
    for count in (1, 80):
        plan = {"seq_len": count, "routing": routing, "rank": 77, "norm": count == 1}
        result = run_case(ROUTER, ROUTER_FAMILY, plan, 3, "cpu", kernel)
        assert not result.failures
        assert not result.vacuous


@pytest.mark.parametrize("mistake", [reversed_ties, next_expert, worst_first, not_renormalized, bf16_weights])
def test_a_wrong_router_is_rejected(sgl_kernel, monkeypatch, mistake):
    correct = sgl_kernel.topk_softmax

    def wrong(weights, ids, logits, renormalize=False):
        correct(weights, ids, logits, renormalize)
        mistake(logits, weights, ids)

    monkeypatch.setattr(sgl_kernel, "topk_softmax", wrong)
    routing = "ties" if mistake is reversed_ties else "random"
    plan = {"seq_len": 80, "routing": routing, "rank": 0, "norm": True}
    result = run_case(ROUTER, ROUTER_FAMILY, plan, 3, "cpu", ROUTER_FAMILY.kernels[0])
    assert any("topk_softmax: output" in failure for failure in result.failures)


def test_other_numbers_of_experts_have_no_router_kernel():
    kernel = ROUTER_FAMILY.kernels[0]
    for number, fits in ((8, True), (256, True), (60, False), (512, False)):
        definition = ROUTER.with_const_axes({"num_experts": number})
        assert (kernel.unsupported(definition) is None) is fits


# The experts


@EVERY_FORMAT
def test_the_ranks_add_up_to_the_layer(name):
    """The outputs of four ranks add up to the whole, except for roundings."""
    twin = TWINS[name].with_const_axes(LAYOUTS["whole"])
    quarter = twin.with_const_axes({"num_local_experts": 4})
    inputs, expected = case(twin, routing="random", norm=False)
    total = torch.zeros_like(expected.value)
    for rank in range(4):
        here = slice(4 * rank, 4 * rank + 4)
        part = {key: value[here] if key.startswith("gemm") else value for key, value in inputs.items()}
        total += quarter.run(**{**part, "local_expert_offset": 4 * rank}).double()
    assert float((total - expected.value).norm() / expected.value.norm()) < 2.0**-8


def test_the_parts_of_the_intermediate_features_add_up_to_the_layer():
    """Tensor parallelism: each rank has the same part of the columns of up, gate and down."""
    inputs, expected = case(TWINS["bf16"], routing="local", norm=False)
    half = TWINS["bf16"].with_const_axes({"intermediate_size": 192, "gemm1_out_size": 384})
    total = torch.zeros_like(expected.value)
    for part in (slice(0, 192), slice(192, 384)):
        gemm1 = inputs["gemm1_weights"].unflatten(1, (2, 384))[:, :, part].flatten(1, 2)
        gemm2 = inputs["gemm2_weights"][:, :, part]
        total += half.run(**{**inputs, "gemm1_weights": gemm1, "gemm2_weights": gemm2}).double()
    assert float((total - expected.value).norm() / expected.value.norm()) < 2.0**-8


@EVERY_FORMAT
def test_ranks_without_tokens_and_no_tokens(sgl_kernel, name):
    twin = TWINS[name]
    family = family_of(twin)
    inputs, expected = case(twin, routing="elsewhere", seq_len=20, rank=2)
    assert bool((twin.run(**inputs) == 0).all())
    assert bool((kernel_outputs(twin, family.kernels[0], inputs)[0]["output"] == 0).all())
    assert vacuity(twin, {"output": expected}, family.policies(family.kernels[0]))
    assert twin.run(**case(twin, seq_len=0)[0]).shape == (0, 512)


@EVERY_FORMAT
def test_routings_do_what_they_say(name):
    for routing, rank, (low, high) in (("local", 1, (8, 8)), ("one_expert", 3, (1, 1)), ("elsewhere", 0, (0, 0))):
        inputs, _ = case(TWINS[name], routing=routing, rank=rank, seq_len=20)
        chosen = softmax_route(TWINS[name], inputs)[:, 8 * rank : 8 * rank + 8] > 0
        here = chosen.sum(dim=1)
        assert low <= int(here.min()) <= int(here.max()) <= high
        if routing == "one_expert":
            assert int(chosen.any(dim=0).sum()) == 1


@pytest.mark.parametrize(("layout", "possible"), [("whole", False), ("single", True), ("ranks", True)])
def test_plans_leave_a_rank_only_where_others_can_take_over(layout, possible):
    twin = TWINS["bf16"].with_const_axes(LAYOUTS[layout])
    seen = {plan["routing"] for plan in drawn_plans(family_of(twin), twin)}
    assert ("elsewhere" in seen) is possible
    assert {"local", "ties", "one_expert"} <= seen


# Error models


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routing", ["random", "local", "ties", "one_expert"])
@EVERY_FORMAT
def test_the_pipelines_are_within_their_bounds(sgl_kernel, name, routing, layout):
    twin = TWINS[name].with_const_axes(LAYOUTS[layout])
    kernel = family_of(twin).kernels[0]
    for seed, (count, values) in enumerate(((1, "normal"), (5, "tiny"), (64, "large"))):
        changes = {"seq_len": count, "routing": routing, "values": values, "norm": count == 5, "zero_row": count > 1}
        inputs, expected = case(twin, seed, **changes)
        outputs, failures = kernel_outputs(twin, kernel, inputs)
        assert not failures
        comparison = kernel.compare["output"].compare(outputs["output"], expected)
        assert comparison.passed, comparison
        # The bound models the errors and is not just wide: a good part of it is used (of 8 deviations, 5 occur).
        assert count < 64 or comparison.ratio > 0.3, comparison


@EVERY_FORMAT
def test_weights_that_are_rounded_alike_are_allowed_for(sgl_kernel, name):
    """Tied logits give many tokens the same weights, whose roundings do not cancel, however many tokens there are."""
    twin = TWINS[name].with_const_axes(LAYOUTS["whole"])
    kernel = family_of(twin).kernels[0]
    policy = kernel.compare["output"]
    inputs, expected = case(twin, 2, routing="ties", seq_len=300)
    outputs, _ = kernel_outputs(twin, kernel, inputs)
    assert policy.compare(outputs["output"], expected).passed
    shift = float(expected.parts["rounding_shift"])
    assert shift < -(2.0**-11)
    measured = fitted_gain(outputs["output"], expected)
    deviation = float(expected.parts["hopper_gain"].sqrt())
    assert measured == pytest.approx(shift, abs=3 * deviation)
    assert not policy.compare((outputs["output"] * 1.01).to(torch.bfloat16), expected).passed


def test_products_of_short_numbers_that_round_alike_are_allowed_for(sgl_kernel):
    """One local expert with a weight just below 1: nearly every product with a bf16 result rounds down."""
    twin = TWINS["bf16"].with_const_axes(LAYOUTS["single"])
    inputs, expected = case(twin, 2, routing="local", seq_len=255, norm=False)
    policy = family_of(twin).kernels[0].compare["output"]
    outputs, _ = kernel_outputs(twin, family_of(twin).kernels[0], inputs)
    assert policy.compare(outputs["output"], expected).passed
    shift, deviation = float(expected.parts["rounding_shift"]), float(expected.parts["hopper_gain"].sqrt())
    measured = fitted_gain(outputs["output"], expected)
    assert shift < -3 * deviation
    assert measured == pytest.approx(shift, abs=3 * deviation)
    assert not policy.compare((outputs["output"] * 1.01).to(torch.bfloat16), expected).passed


def wrong_half(twin, inputs):
    size = twin.const_axes["intermediate_size"]
    weights = inputs["gemm1_weights"]
    inputs["gemm1_weights"] = weights.view(torch.uint8).roll(size, 1).view(weights.dtype)
    if "gemm1_weights_scale" in inputs:
        inputs["gemm1_weights_scale"] = inputs["gemm1_weights_scale"].roll(size // 128, 1)


def other_normalization(twin, inputs):
    inputs["norm_topk_prob"] = not inputs["norm_topk_prob"]


def offset_off_by_one(twin, inputs):
    inputs["local_expert_offset"] += 1


def weights_of_the_next_expert(twin, inputs):
    inputs["gemm2_weights"] = inputs["gemm2_weights"].view(torch.uint8).roll(1, 0).view(inputs["gemm2_weights"].dtype)


def hidden_features_shifted(twin, inputs):
    hidden = inputs["hidden_states"]
    inputs["hidden_states"] = hidden.view(torch.uint8).roll(hidden.element_size(), 1).view(hidden.dtype)


MISTAKES = [wrong_half, other_normalization, offset_off_by_one, weights_of_the_next_expert, hidden_features_shifted]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@EVERY_FORMAT
def test_a_wrong_pipeline_is_rejected(sgl_kernel, name, mistake):
    twin = TWINS[name]
    family = family_of(twin)
    kernel = family.kernels[0]
    inputs, expected = case(twin)
    mistake(twin, inputs)
    outputs = kernel.call(twin, inputs, poisoned_outputs(twin, inputs, 0))["output"]
    policies = [family.compare["output"], *(kernel.compare["output"] for kernel in family.kernels)]
    for policy in policies:
        assert not policy.compare(outputs, expected).passed, policy.reason
        assert not policy.compare(twin.run(**inputs), expected).passed, policy.reason


@EVERY_FORMAT
def test_the_gain_of_a_case_is_told_apart_from_its_rounding_noise(sgl_kernel, name):
    """Over many seeds, the deviation of the scale that the pipeline's roundings cause is about the modeled one."""
    twin = TWINS[name]
    cases = [case(twin, seed, routing="local", seq_len=8) for seed in range(16)]
    assert 0.5 < measured_over_modeled_gain(twin, family_of(twin).kernels[0], cases) < 1.5


def test_every_definition_fits_its_pipeline():
    """The kernels need rows that are multiples of 16 bytes, and for fp8 blocks of 128."""
    checked = 0
    for definition in definitions():
        axes = definition.const_axes
        if "softmax_routing" not in definition.name:
            continue
        assert family_of(definition).kernels[0].unsupported(definition) is None
        assert axes["num_experts"] % axes["num_local_experts"] == 0
        multiple = 128 if "fp8" in definition.name else 8
        assert axes["intermediate_size"] % multiple == axes["hidden_size"] % multiple == 0
        assert axes.get("num_hidden_blocks", 4) % 4 == 0
        checked += 1
    assert checked >= 27
