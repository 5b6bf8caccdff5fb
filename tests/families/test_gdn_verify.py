"""Verification of draft tokens: what decoding the same tokens one by one gives, from a pool that stays as it is."""

from __future__ import annotations

import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import reference_outputs

#: Three tokens, each with sums of 16 products in float32, whose order a library chooses; they are below 8.
SUMS = 3 * 16 * 8 * 2**-24


def test_each_token_is_a_step_of_decoding_and_the_pool_is_not_written():
    verify = flashinfer_trace.load("gdn_verify_qk4_v8_d128_k_last")
    decode = flashinfer_trace.load("gdn_decode_qk4_v8_d128_k_last")
    family = family_of(verify)
    twin, one_token = verify.with_const_axes(family.twin), decode.with_const_axes(family.twin)
    plan = {"batch_size": 4, "seq_len": 3, "pool_size": 2, "decay": "usual", "beta": "mixed", "keys": "equal"}
    inputs = family.inputs(twin, {**plan, "scale": None}, 1, "cpu")
    pool = inputs["initial_state"].clone()
    found = reference_outputs(twin, inputs, 0)
    assert torch.equal(inputs["initial_state"], pool)
    state = pool[inputs["initial_state_indices"]]
    shared = {name: inputs[name] for name in ("A_log", "dt_bias", "scale")}
    for token in range(3):
        here = {name: inputs[name][:, token : token + 1] for name in ("q", "k", "v", "a", "b")}
        step = reference_outputs(one_token, {**here, **shared, "state": state}, 0)
        state = step["new_state"]
        torch.testing.assert_close(found["output"][:, token : token + 1], step["output"], rtol=2**-7, atol=SUMS)
        torch.testing.assert_close(found["intermediate_states"][:, token], state, rtol=0, atol=SUMS)
