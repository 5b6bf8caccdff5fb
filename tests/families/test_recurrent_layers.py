"""Short convolutions, Mamba2's state update and gated norms: results by hand."""

from __future__ import annotations

import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import reference_outputs


def case(name, seed=1, **plan):
    """(twin, inputs) of a Definition."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    twin = definition.with_const_axes(family.twin)
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
