"""Short convolutions, Mamba2's state update and gated norms: results by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from drawn_plans import small_twin

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.mamba_ssu_prefill import CHUNK
from flashinfer_trace.families.short_conv import MEAN_OF_PRODUCTS
from flashinfer_trace.harness.case import reference_outputs


def case(name, seed=1, **plan):
    """(twin, inputs) of a Definition."""
    family, twin = small_twin(name)
    return twin, family.inputs(twin, plan, seed, "cpu")


def test_a_convolution_of_tokens_one_by_one_is_that_of_all():
    plan = {"seq_lens": [7], "num_states": 3, "values": "normal", "initial": "all"}
    twin, inputs = case("causal_conv1d_c2048_w4", **plan)
    whole = reference_outputs(twin, inputs, 0)
    step = flashinfer_trace.load("causal_conv1d_update_c2048_w4").with_const_axes(twin.const_axes)
    state = inputs["conv_states"]
    for token, expected in zip(inputs["x"], whole["output"], strict=True):
        given = {"x": token[None], "conv_state": state, "weight": inputs["weight"]}
        done = reference_outputs(step, {**given, "conv_state_indices": inputs["cache_indices"]}, 0)
        torch.testing.assert_close(done["output"][0], expected, rtol=2**-7, atol=0)
        state = done["conv_state_out"]
    assert torch.equal(state, whole["conv_states_out"])


def test_without_an_initial_state_zeros_come_before_the_first_token():
    plan = {"seq_lens": [1], "num_states": 1, "values": "normal", "initial": "none"}
    twin, inputs = case("causal_conv1d_c2048_w4", **plan)
    outputs = reference_outputs(twin, inputs, 0)
    y = inputs["x"][0].float() * inputs["weight"][:, 3].float()
    assert torch.equal(outputs["output"][0], torch.nn.functional.silu(y).bfloat16())
    assert torch.equal(outputs["conv_states_out"][0, :, 2], inputs["x"][0])
    assert not outputs["conv_states_out"][0, :, :2].any()


def test_a_long_step_forgets_the_state_and_a_short_one_keeps_it():
    plan = {"batch_size": 3, "state_cache_size": 3, "values": "normal", "features": False, "padding": False}
    twin, inputs = case("mamba_ssu_decode_h32_d64_s128_ng2", steps="usual", **plan)
    inputs["A"].fill_(-1.0)
    inputs["x"].zero_()
    for step, kept in ((-100.0, 1.0), (100.0, 0.0)):
        inputs["dt"].fill_(step)
        outputs = reference_outputs(twin, inputs, 0)
        assert torch.equal(outputs["new_state"], inputs["state"] * kept)


def test_padding_changes_no_state_and_gives_zero():
    plan = {"batch_size": 2, "state_cache_size": 3, "values": "normal", "features": True, "padding": True}
    twin, inputs = case("mamba_ssu_decode_h32_d64_s128_ng2", steps="usual", **plan)
    outputs = reference_outputs(twin, inputs, 0)
    assert not outputs["output"][1].any() and outputs["output"][0].any()
    changed = (outputs["new_state"] != inputs["state"]).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == inputs["state_batch_indices"][:1].tolist()


def test_the_gate_before_the_norm_counts_in_the_mean():
    """Of equal features, half of them switched off: the others have a mean square of one half."""
    plan = {"num_tokens": 1, "values": "normal", "gate": "normal", "zero_row": False}
    twin, inputs = case("silu_gate_grouped_rmsnorm_h4096_g1024_eps1e5", **plan)
    inputs["hidden_states"].fill_(1.0)
    inputs["weight"].fill_(1.0)
    inputs["gate"][:, ::2], inputs["gate"][:, 1::2] = -100.0, 100.0
    output = reference_outputs(twin, inputs, 0)["output"][0]
    torch.testing.assert_close(output[1::2].float(), torch.full((48,), 2.0**0.5), rtol=2**-8, atol=0)
    assert output[::2].abs().max() < 1e-6


def test_products_of_two_bfloat16_are_off_on_average():
    """Each of the 2^14 products of two significands, rounded to bf16: their mean is below what is allowed."""
    significands = torch.arange(128, 256).bfloat16()
    exact = significands.double()[:, None] * significands.double()
    rounded = (significands[:, None] * significands).double()
    for weight in (torch.ones_like(exact), 1 / exact.square()):
        mean = float((weight * (rounded - exact) * exact).sum() / (weight * exact.square()).sum())
        assert -MEAN_OF_PRODUCTS < mean < -MEAN_OF_PRODUCTS / 2


def bf16(x):
    return x.bfloat16().float()


def scan_kernel(inputs):
    """The way of SGLang: chunks of CHUNK tokens of all sequences, in float32, with factors rounded to bf16."""
    heads, groups = inputs["x"].shape[1], inputs["B"].shape[1]
    x, dt = inputs["x"].float(), torch.nn.functional.softplus(inputs["dt"].float() + inputs["dt_bias"].float())
    write, read = (inputs[name].float().repeat_interleave(heads // groups, dim=1) for name in "BC")
    logs = torch.cat([part.cumsum(0) for part in (dt * inputs["A"]).split(CHUNK)])
    output, states = torch.zeros_like(inputs["x"]), inputs["initial_states"].clone()
    for sequence, (first, end) in enumerate(zip(inputs["cu_seqlens"][:-1], inputs["cu_seqlens"][1:], strict=True)):
        cuts = [int(first), *(cut for cut in range(0, int(end), CHUNK) if cut > first), int(end)]
        for begin, stop in itertools.pairwise(cuts):
            here, state = slice(begin, stop), states[sequence]
            before = logs[begin - 1] if begin % CHUNK else torch.zeros(heads)
            c, step = logs[here].T, dt[here].T
            values, written, reads = (each[here].transpose(0, 1) for each in (x, write, read))
            decay = (c[:, :, None] - c[:, None]).clamp_max(0).exp() * torch.ones(stop - begin, stop - begin).tril()
            scores = bf16((reads @ written.mT) * decay * step[:, None])
            found = (reads @ bf16(state).mT) * (c - before[:, None]).exp()[..., None] + scores @ values
            output[here] = (found.transpose(0, 1) + inputs["D"].float()[:, None] * x[here]).bfloat16()
            scaled = bf16(written * ((c[:, -1:] - c).exp() * step)[..., None])
            states[sequence] = state * (c[:, -1] - before).exp()[:, None, None] + values.mT @ scaled
    return {"output": output, "final_states": states}


@pytest.mark.parametrize("steps", ["usual", "short", "long"])
def test_chunks_of_a_scan_keep_their_bounds(steps):
    """They use at least a fiftieth of them, so the bounds mean something."""
    name, worst = "mamba_ssd_prefill_h128_d64_s128_ng8", {"output": 0.0, "final_states": 0.0}
    family = family_of(flashinfer_trace.load(name))
    kernel, _ = family.kernels
    for lengths in ([20, 65, CHUNK], [1, 2 * CHUNK + 3], [CHUNK, 9]):
        twin, inputs = case(name, seq_lens=lengths, values="normal", steps=steps, state="normal")
        expected = family.expected(twin, inputs)
        for each, output in scan_kernel(inputs).items():
            comparison = kernel.compare[each].compare(output, expected[each])
            assert comparison.passed, f"{each}: {comparison}"
            worst[each] = max(worst[each], comparison.ratio)
    assert min(worst.values()) > 0.02
