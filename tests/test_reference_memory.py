"""No expert or linear layer of a DeepSeek-V3 rank takes more than 16 GiB, inputs included, for 64 tokens.

Each runs with widths that are a fraction of the Definition's, on all its experts. No tensor has more than two widths
among its dimensions, so at full size it takes at most the square of the reciprocal fraction times as much.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import flashinfer_trace

GIBIBYTES = 16
TOKENS, TOP_K = 64, 8
#: An eighth of DeepSeek-V3's experts.
RANK = {"num_experts": 32, "num_local_experts": 32}
#: What a width is made smaller by, if its blocks allow it.
FRACTIONS = (8, 4, 2, 1)
LAYERS = [
    *(
        one
        for one in flashinfer_trace.definitions(tag="ep:8")
        if any(one.const_axes.get(axis) == count for axis, count in RANK.items())
    ),
    *flashinfer_trace.definitions(op_type="gemm", tag="model:deepseek-v3"),
]


def is_width(axis: str) -> bool:
    """Whether the axis counts features, or blocks or bytes of them."""
    return (axis.endswith(("_size", "_blocks", "_bytes")) and axis != "block_size") or axis in ("n", "k", "n_bytes")


def narrowed(definition):
    """The Definition with narrower widths, and how many times narrower they are."""
    widths = {axis: value for axis, value in definition.const_axes.items() if is_width(axis)}
    times = next(times for times in FRACTIONS if not any(value % times for value in widths.values()))
    return definition.with_const_axes({axis: value // times for axis, value in widths.items()}), times


def peak_bytes(run):
    """The most bytes that tensors made by `run` take at any time on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert kept is not None and events
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_the_peak_is_that_of_what_lives_at_once():
    def run():
        first = torch.zeros(1_000_000)
        second = first + 1
        del first
        return second * 2

    assert peak_bytes(run) == pytest.approx(8_000_000, rel=0.001)


def test_all_weights_in_float32_at_once_would_show():
    """As a reference has it that makes three float32 tensors of all experts before it begins."""
    definition, times = narrowed(flashinfer_trace.load("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"))
    weights = flashinfer_trace.make_inputs(definition, {"seq_len": TOKENS}, seed=0, device="cpu")["gemm1_weights"]
    peak = peak_bytes(lambda: (weights.float(), torch.ones(weights.shape), torch.zeros(weights.shape)))
    experts, rows, columns = 32, 4096, 7168
    assert peak * times**2 == pytest.approx(3 * 4 * experts * rows * columns, rel=0.001)


def test_the_experts_have_every_format():
    names = {definition.name.partition("_e32")[0] for definition in LAYERS}
    assert {"moe_bf16_ds_routing_topk8_ng8_kg4", "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4"} < names
    assert {"moe_nvfp4_ds_routing_topk8_ng8_kg4", "moe_w4a8_grouped_gemm", "moe_fp8_block_scale_grouped_gemm"} < names


@pytest.mark.parametrize("definition", LAYERS, ids=lambda definition: definition.name)
def test_a_layer_fits(definition):
    small, times = narrowed(definition)
    rows = {"seq_len": TOKENS, "m": TOKENS, "total_rows": TOKENS * TOP_K}
    axes = {axis: rows[axis] for axis in small.var_axes if axis in rows}
    assert axes
    inputs = flashinfer_trace.make_inputs(small, axes, seed=0, device="cpu")
    given = sum(each.nbytes for each in inputs.values() if isinstance(each, torch.Tensor))
    peak = peak_bytes(lambda: small.compiled(*(inputs[name] for name in small.inputs)))
    assert (given + peak) * times**2 <= GIBIBYTES * 2**30
