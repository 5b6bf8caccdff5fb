"""Rotary embedding: angles computed by hand, and policies that can tell one rounding from three."""

from __future__ import annotations

import math

import pytest
import torch
from drawn_plans import drawn

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.rope import CACHES, POSITIONS, ROTATED, STEPWISE, make_positions
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare

NAMES = {
    "neox": "rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128",
    "gptj": "rope_with_cos_sin_cache_gptj_style_h128_kv1_d64_rd64",
}
PLAN = {
    "num_tokens": 12,
    "max_seq_len": 64,
    "values": "normal",
    "cache": "rotary",
    "positions": "random",
    "theta": 10_000.0,
    "bfloat16_cache": True,
}


def small(style, **const_axes):
    definition = flashinfer_trace.load(NAMES[style])
    return prepare(definition, family_of(definition), "cpu", full=False).with_const_axes(const_axes)


def stepwise_kernel(style, inputs):
    """The result of sgl-kernel's op: each product, and their sum, rounded to bf16."""
    half = inputs["cos_sin_cache"].shape[1] // 2
    chosen = inputs["cos_sin_cache"][inputs["positions"]].to(torch.bfloat16).unsqueeze(1)
    cos, sin = chosen[..., :half], chosen[..., half:]
    outputs = {}
    for name in ("q", "k"):
        out = inputs[name].clone()
        first = slice(0, half) if style == "neox" else slice(0, 2 * half, 2)
        second = slice(half, 2 * half) if style == "neox" else slice(1, 2 * half, 2)
        x, y = inputs[name][..., first], inputs[name][..., second]
        out[..., first], out[..., second] = x * cos - y * sin, y * cos + x * sin
        outputs[f"{name}_out"] = out
    return outputs


@pytest.mark.parametrize(("style", "paired"), [("neox", 2), ("gptj", 1)])
def test_a_quarter_turn_by_hand(style, paired):
    """Feature 0 moves to its partner, and the partner, negated, to feature 0; features that are not rotated stay."""
    definition = small(style, num_qo_heads=1, num_kv_heads=1, head_size=6, rotary_dim=4)
    cache = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]])  # position 1 turns the first pair by 90 degrees
    states = torch.arange(1.0, 7.0).repeat(2, 1, 1).to(torch.bfloat16)
    q_out, k_out = definition.run(states, states.clone(), cache, torch.tensor([1, 0]))
    expected = states[0, 0].clone()
    expected[0], expected[paired] = -states[0, 0, paired], states[0, 0, 0]
    assert torch.equal(q_out[0, 0], expected)
    assert torch.equal(q_out[1], states[1])
    assert torch.equal(k_out, q_out)


@pytest.mark.parametrize("style", NAMES)
def test_scores_depend_on_the_distance_of_positions_alone(style):
    definition = small(style, num_qo_heads=1, num_kv_heads=1, head_size=16, rotary_dim=16)
    inputs = family_of(definition).inputs(definition, {**PLAN, "bfloat16_cache": False}, 3, "cpu")
    q, k = inputs["q"][:1].expand(4, 1, 16), inputs["k"][:1].expand(4, 1, 16)
    q_out, _ = definition.run(q, k, inputs["cos_sin_cache"], torch.tensor([5, 20, 41, 63]))
    _, k_out = definition.run(q, k, inputs["cos_sin_cache"], torch.tensor([2, 17, 38, 60]))
    scores = (q_out.double() * k_out.double()).sum(-1).flatten()
    sizes = q_out.double().norm(dim=-1) * k_out.double().norm(dim=-1)
    # Each factor was rounded once to bf16.
    assert ((scores - scores[0]).abs() <= 4 * 2**-8 * sizes.flatten()).all()
    elsewhere, _ = definition.run(q, k, inputs["cos_sin_cache"], torch.tensor([9, 24, 45, 3]))
    assert ((elsewhere.double() * k_out.double()).sum(-1).flatten() - scores[0]).abs().max() > 0.1


@pytest.mark.parametrize("style", NAMES)
@pytest.mark.parametrize("cache", sorted(set(CACHES)))
def test_a_stepwise_kernel_meets_its_own_bound_and_not_the_references(style, cache):
    definition = small(style)
    family = family_of(definition)
    inputs = family.inputs(definition, {**PLAN, "cache": cache}, 5, "cpu")
    expected = family.oracle(definition, inputs)
    outputs = stepwise_kernel(style, inputs)
    assert all(STEPWISE.compare(outputs[name], expected[name]).passed for name in outputs)
    passes = [ROTATED.compare(outputs[name], expected[name]).passed for name in outputs]
    assert all(passes) if cache == "quarter_turns" else not any(passes)


@pytest.mark.parametrize("style", NAMES)
@pytest.mark.parametrize("spoil", ["other style", "positions off by one", "sign of sin", "rotary_dim", "cos and sin"])
def test_what_goes_wrong_in_a_rotation_is_rejected(style, spoil):
    definition = small(style)
    family = family_of(definition)
    inputs = family.inputs(definition, {**PLAN, "positions": "consecutive"}, 7, "cpu")
    half = definition.const_axes["rotary_dim"] // 2
    wrong, other = dict(inputs), definition
    if spoil == "other style":
        other = small("gptj" if style == "neox" else "neox")
    elif spoil == "positions off by one":
        wrong["positions"] = (inputs["positions"] + 1) % 64
    elif spoil == "sign of sin":
        wrong["cos_sin_cache"] = inputs["cos_sin_cache"] * torch.tensor([1.0] * half + [-1.0] * half)
    elif spoil == "cos and sin":
        wrong["cos_sin_cache"] = inputs["cos_sin_cache"].roll(half, dims=1)
    else:  # the features that should be copied are rotated as well
        other = small(style, rotary_dim=16)
        wrong["cos_sin_cache"] = torch.cat([inputs["cos_sin_cache"]] * 2, dim=1)
    outputs = reference_outputs(other, wrong, 7)
    for kernel in (None, *family.kernels):
        comparisons = evaluate(family.policies(kernel), outputs, family.oracle(definition, inputs))
        assert not any(comparison.passed for comparison in comparisons.values())


def test_a_changed_copy_is_rejected_however_small():
    definition = small("neox")
    family = family_of(definition)
    inputs = family.inputs(definition, PLAN, 5, "cpu")
    expected = family.oracle(definition, inputs)
    outputs = reference_outputs(definition, inputs, 5)
    outputs["q_out"][3, 1, -1] *= 1 + 2**-7
    assert ROTATED.compare(outputs["q_out"], expected["q_out"]).ratio == math.inf
    assert STEPWISE.compare(outputs["q_out"], expected["q_out"]).ratio == math.inf
    assert ROTATED.compare(outputs["k_out"], expected["k_out"]).passed


@pytest.mark.parametrize("kind", sorted(set(POSITIONS)))
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_positions_lie_in_the_cache(kind, rows):
    positions = make_positions(kind, 100, rows, Draws(1, "cpu"))
    assert positions.dtype == torch.int64
    assert positions.shape == (100,)
    assert 0 <= int(positions.min()) <= int(positions.max()) < rows
    steps = set(positions.diff().tolist())
    if rows == 64:
        assert {"consecutive": steps == {1, -63}, "descending": steps == {-1, 63}}.get(kind, True)
        if kind == "random":
            assert positions.unique().numel() < 100 and min(steps) < 0 < max(steps)


def test_a_gpu_draws_enough_tokens_for_both_launches_of_flashinfer():
    """This holds up to the heads of Llama-3.1-8B; with more heads, an intermediate result stays below 1 GB."""
    definition = flashinfer_trace.load(NAMES["neox"])
    strategy = family_of(definition).plans(PlanRequest(definition, {"num_tokens": (1, 1 << 20)}, large=True))
    found = [plan["num_tokens"] for plan in drawn(strategy, 400, seed=1)]
    assert min(found) < 100
    assert max(found) >= 16896
