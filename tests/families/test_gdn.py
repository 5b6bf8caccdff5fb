"""Gated delta nets: results by hand, and a model of the kernels that compute chunks, against their bounds."""

from __future__ import annotations

import math

import pytest
import torch
from drawn_plans import small_twin

from flashinfer_trace.families.gdn_prefill import ADDED, BY_CHUNKS, CHUNK, WITH_FLOOR, gates_for
from flashinfer_trace.harness.case import reference_outputs

PLAN = {"decay": "usual", "beta": "usual", "scale": None}


def case(name, seed=1, **plan):
    """(twin, inputs, expected) of a Definition."""
    family, twin = small_twin(name)
    inputs = family.inputs(twin, {**PLAN, **plan}, seed, "cpu")
    return twin, inputs, family.expected(twin, inputs)


def test_a_key_that_is_corrected_in_full_gives_back_its_value():
    """With a decay and a beta of 1 and a key of norm 1, the query that equals the key reads the value."""
    twin, inputs, _ = case("gdn_decode_qk4_v8_d128_k_last", batch_size=2, values="normal")
    key = torch.zeros_like(inputs["k"])
    key[..., 3] = 1.0
    inputs |= {"q": key, "k": key, "a": inputs["a"] * 0 - 100, "b": inputs["b"] * 0 + 100, "scale": 1.0}
    outputs = reference_outputs(twin, inputs, 0)
    assert torch.equal(outputs["output"], inputs["v"])
    others = torch.arange(16) != 3
    assert torch.equal(outputs["new_state"][..., others], inputs["state"][..., others])


def test_padding_answers_zero_and_changes_no_state():
    twin, inputs, _ = case("gdn_packed_decode_qk4_v8_d128", batch_size=4, pool_size=6, padding=True, values="normal")
    outputs = reference_outputs(twin, inputs, 0)
    padding = inputs["state_indices"] < 0
    assert padding.tolist() == [False, True, False, False]
    assert not outputs["output"][padding].any() and outputs["output"][~padding].any(-1).all()
    changed = (outputs["state_out"] != inputs["state"]).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == sorted(inputs["state_indices"][~padding].tolist())


def bf16(x):
    return x.bfloat16().float()


def decayed(a, b, c):
    """Products of rows t of a and s of b, decayed from s to t; by features, decays take place in rounded operands."""
    if c.shape[-1] == 1:
        return (a @ b.mT) * (c - c.mT).clamp_max(0).exp()
    terms = bf16(a.unsqueeze(2) * (c.unsqueeze(2) - c.unsqueeze(1)).clamp_max(0).exp()) * bf16(b.unsqueeze(1))
    return terms.sum(-1)


def chunk_kernel(inputs, added=0.0, inverted=torch.bfloat16, off=0.0):
    """The way of kernels: chunks of 64 tokens in float32, with every operand of a product rounded to bf16. FlashInfer's
    adds a number to each decay, inverts in fp16, and takes logarithms that are off."""
    rates = inputs["A_log"] if inputs["a"].ndim == 2 else inputs["A_log"].unsqueeze(-1)
    log_decay, all_betas = gates_for({**inputs, "A_log": rates})
    log_decay = ((log_decay.exp() + added).log() if added else log_decay) + off
    heads = all_betas.shape[1]
    q, k = (inputs[name].float().repeat_interleave(heads // inputs[name].shape[1], dim=1) for name in "qk")
    output, states = torch.zeros_like(inputs["v"]), inputs["state"].clone()
    for sequence, (first, end) in enumerate(zip(inputs["cu_seqlens"][:-1], inputs["cu_seqlens"][1:], strict=True)):
        for start in range(first, end, CHUNK):
            here = slice(start, min(start + CHUNK, end))
            queries, keys, values = (x[here].transpose(0, 1) for x in (q, k, inputs["v"].float()))
            logs, beta = log_decay[here], all_betas[here].T.unsqueeze(-1)
            c = (logs if logs.ndim == 3 else logs.unsqueeze(-1)).cumsum(0).transpose(0, 1)
            lower = torch.ones(c.shape[1], c.shape[1]).tril()
            system = torch.eye(len(lower)) + (beta * decayed(keys, keys, c) * lower.tril(-1)).to(inverted).float()
            inverse, state = torch.linalg.inv(system).to(inverted).bfloat16().float(), states[sequence]
            u = bf16(inverse @ bf16(beta * values))
            w = bf16(inverse @ bf16(beta * c.exp() * keys))
            change = bf16(u - w @ bf16(state).mT)
            scores = bf16(decayed(queries, keys, c) * lower)
            read = bf16(c.exp() * queries) @ bf16(state).mT + scores @ change
            output[here] = (inputs["scale"] * read).transpose(0, 1).bfloat16()
            to_last = bf16((c[:, -1:] - c).exp() * keys)
            states[sequence] = c[:, -1:].exp() * state + change.mT @ to_last
    return {"output": output, "new_state": states}


@pytest.mark.parametrize("keys", ["apart", "equal"])
@pytest.mark.parametrize("decay", ["usual", "keep", "forget"])
@pytest.mark.parametrize("name", ["gdn_prefill_qk4_v8_d128_k_last", "kda_prefill_qk8_v8_d128"])
def test_chunks_in_bf16_keep_their_bounds(name, decay, keys):
    """They use at least a fiftieth of them, so the bounds mean something."""
    worst = dict.fromkeys(BY_CHUNKS, 0.0)
    for seed in range(3):
        plan = {"seq_lens": [20, 65, 200], "keys": keys, "state": "normal"}
        _, inputs, expected = case(name, seed, decay=decay, beta="mixed", **plan)
        for each, output in chunk_kernel(inputs).items():
            comparison = BY_CHUNKS[each].compare(output, expected[each])
            assert comparison.passed, f"{each}: {comparison}"
            worst[each] = max(worst[each], comparison.ratio)
    assert min(worst.values()) > 0.02


def test_chunks_inverted_in_fp16_keep_their_bounds():
    """Decays to nothing and betas of nearly 0 show what is added to a decay, which the other bounds do not allow."""
    refused = False
    for seed in range(6):
        plan = {"seq_lens": [20, 65], "keys": "equal", "state": "normal", "decay": ("usual", "forget")[seed % 2]}
        _, inputs, expected = case("gdn_prefill_qk4_v8_d128_k_last", seed, beta=("mixed", "zero")[seed // 3], **plan)
        for each, output in chunk_kernel(inputs, ADDED, torch.float16).items():
            comparison = WITH_FLOOR[each].compare(output, expected[each])
            assert comparison.passed, f"{each}: {comparison}"
            refused = refused or not BY_CHUNKS[each].compare(output, expected[each]).passed
    assert refused


@pytest.mark.parametrize(("times", "passed"), [(-1, True), (0.25, True), (1, True), (2, False)])
def test_logarithms_may_all_be_off_by_what_ptx_allows(times, passed):
    """lg2.approx is up to 2^-22 off: a state that decays for 127 tokens shows a quarter of it to other bounds."""
    _, inputs, expected = case(
        "gdn_prefill_qk4_v8_d128_k_last", 0, beta="zero", seq_lens=[127], keys="apart", state="normal"
    )
    state = chunk_kernel(inputs, off=times * 2**-22 * math.log(2))["new_state"]
    assert WITH_FLOOR["new_state"].compare(state, expected["new_state"]).passed == passed
    assert not BY_CHUNKS["new_state"].compare(state, expected["new_state"]).passed
