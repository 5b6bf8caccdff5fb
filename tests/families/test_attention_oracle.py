"""The oracle of attention, which computes requests together, against loops over requests, queries and heads."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import DECODE, LATENT, LATENT_PREFILL, PREFILL, RAGGED, drawn, queries
from emulated_attention import requests_in

import flashinfer_trace
from flashinfer_trace.families import family_of, gqa_paged
from flashinfer_trace.families.attention import ragged
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import FLUSHED, SMALLEST, Rounding, kernel_policies
from flashinfer_trace.families.mla_paged import inputs as latent
from flashinfer_trace.harness.layouts import LAYOUT
from flashinfer_trace.verdict.compare import CONFIDENCE, summation_error

#: Bounds that depend on how kernels split keys have tests of their own.
SPLIT = {"partial", "gain_settled_partial", "gain_worst_partial", "gain_squares_partial"}


def loops(name, definition, inputs):
    """(output, lse, parts of each row [queries, heads, ...], sums for the gain), computed row by row in float64."""
    page_size = definition.const_axes.get("page_size")
    memory = (latent if name in LATENT else gqa_paged).memory(inputs, page_size) if page_size else ragged.memory(inputs)
    q, causal = queries(inputs), "qo_indptr" in inputs
    shape = (*q.shape[:2], memory.values.shape[2])
    output = torch.zeros(shape, dtype=torch.float64)
    lse = torch.full(shape[:2], -math.inf, dtype=torch.float64)
    rows = {part: torch.zeros(shape, dtype=torch.float64) for part in ("weighted", "logit", "weights")}
    rows |= {part: torch.zeros_like(lse) for part in ("length", "lse_logit", "others", "squared_others")}
    total: dict[str, float] = {}
    for request in requests_in(memory):
        for row in range(request.first, request.end):
            seen = len(request.keys) - (request.end - 1 - row if causal else 0)
            if seen <= 0:
                continue
            rows["length"][row] = seen
            for head in range(shape[1]):
                shared = head // (shape[1] // request.keys.shape[1])
                keys, values = (each[:seen, shared].double() for each in (request.keys, request.values))
                value, natural, parts, gain = attend(q[row, head].double(), keys, values, inputs["sm_scale"])
                output[row, head], lse[row, head] = value, natural / math.log(2)
                for part, found in parts.items():
                    rows[part][row, head] = found
                for part, found in gain.items():
                    total[part] = total.get(part, 0.0) + float(found)
    return output, lse, rows, total


def attend(query, keys, values, sm_scale):
    """One query head: output, natural lse, its parts, and what it adds to the sums for the gain."""
    logits = keys @ query * sm_scale
    lse = logits.logsumexp(0)
    p = (logits - lse).exp()
    value = p @ values
    error = summation_error(keys.abs() @ query.abs(), len(query)) * sm_scale + 2**-22 * logits.abs()
    rest = torch.where(p == p.max(), 0.0, p)
    lse_logit = (p * error).norm()
    parts = {
        "weighted": p @ values.abs(),
        "logit": ((p * error)[:, None] * values).norm(dim=0) + value.abs() * lse_logit,
        "weights": (rest @ values.abs()).minimum(CONFIDENCE * (rest[:, None] * values).norm(dim=0)),
        "lse_logit": lse_logit,
        "others": rest.sum(),
        "squared_others": rest.square().sum(),
    }
    along, size = values @ value, value.square().sum()
    moves = rest * along.abs().maximum(((values - value) @ value).abs())
    gain = {
        "size": size,
        "logit": 2 * ((p * error * along).square().sum() + (size * lse_logit).square()),
        "keys": (p * along).abs().sum() + size,
    }
    if p.max() > 0.9:
        gain |= {"settled_weights": moves.sum(), "settled_output": size}
    else:
        gain |= {"worst_weights": moves.sum(), "worst_output": size}
        gain |= {"squares_weights": moves.square().sum(), "squares_output": value.square().square().sum()}
    return value, lse, parts, gain


@pytest.mark.parametrize("name", [DECODE[1], PREFILL[0], LATENT[0], LATENT_PREFILL[1], *RAGGED])
def test_requests_computed_together_are_those_of_loops(name):
    family = family_of(flashinfer_trace.load(name))
    definition, plans = drawn(name)
    chosen = [plan for plan in plans if sum(plan["kv_lens"]) < 120 and LAYOUT not in plan][::25]
    for seed, plan in enumerate(chosen):
        inputs = family.inputs(definition, plan, seed, "cpu")
        expected = family.oracle(definition, inputs)
        output, lse, rows, total = loops(name, definition, inputs)
        close(expected["output"].value, output)
        close(expected["lse"].value, lse)
        # Next to nothing, unless weights are below 2^-126: a test of its own.
        flushed = expected["output"].parts[FLUSHED].squeeze(-1)
        assert (flushed >= (rows["length"] > 0) * SMALLEST).all() and (flushed < 1e-35).all()
        for part, found in rows.items():
            by_row = found.unsqueeze(-1) if found.ndim == 2 else found
            close(expected["output"].parts[part], by_row)
            if found.ndim == 2:
                close(expected["lse"].parts[part], found)
        assert {part for part in expected["output"].parts if part not in {*rows, "lse"}} == {
            *SPLIT,
            FLUSHED,
            *(f"gain_{part}" for part in ("size", "logit", "keys")),
            *(f"gain_{kind}_{part}" for kind in ("settled", "worst", "squares") for part in ("weights", "output")),
        }
        for part in expected["output"].parts.keys() - {*rows, *SPLIT, FLUSHED, "lse"}:
            wanted = total.get(part.removeprefix("gain_"), 0.0)
            assert float(expected["output"].parts[part]) == pytest.approx(wanted, rel=1e-9, abs=1e-13)
    assert len(chosen) >= 5


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("exponent", "accepted"), [(-130, True), (-120, False)])
def test_a_weight_that_float32_has_no_number_for_may_be_zero(exponent, accepted):
    """One key, whose value is 0, has all the weight; another one has 2^exponent, and a value of 1."""
    keys = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).view(2, 1, 1)
    memory = Memory(keys, 1 - keys, [0, 1], [2], lambda requests, positions: positions.expand(len(requests), -1))
    q = torch.full((1, 1, 1), -exponent, dtype=torch.bfloat16)
    expected = expected_outputs(q, memory, math.log(2), False, any_chunks())["output"]
    assert float(expected.value) == pytest.approx(2.0**exponent)
    bound = kernel_policies(Rounding(weights=True, sum=True, partial=1))["output"].bound(expected)
    assert bool(expected.value <= bound) == accepted
