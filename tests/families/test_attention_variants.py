"""Attention with capped logits, windows and sinks: oracle against loops, bounds against a kernel's model, adapters."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from drawn_plans import drawn
from emulated_runs import install

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention import kernels
from flashinfer_trace.families.attention.variants import SINKS_NEED_KEYS
from flashinfer_trace.families.gqa_paged import variants
from flashinfer_trace.harness.case import evaluate, kernel_outputs, reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare

DTYPES = {"output": torch.bfloat16, "lse": torch.float32}
FIRST = {
    family_of(one).name: one
    for op_type in ("gqa_paged", "gqa_ragged")
    for one in flashinfer_trace.definitions(op_type)
    if set(one.const_axes) & {"logits_soft_cap", "window_size"} or "sinks" in one.inputs
}
#: Families of SGLang's attention for prefill, which return no lse.
EXTEND = "gqa_extend"
#: Requests shorter and longer than the window of 6 keys, one without keys, and one with more queries than a block.
LENGTHS = {"kv_lens": [9, 0, 6, 4, 71], "q_lens": [3, 0, 1, 4, 70]}


def case(name, logits="normal", **lengths):
    """(family, twin, inputs)."""
    family = family_of(FIRST[name])
    definition = prepare(FIRST[name], family, "cpu", full=False)
    plan = family.plan_for_axes(definition, {}, Draws(0, "cpu"))
    chosen = {key: value for key, value in {**LENGTHS, **lengths}.items() if key in plan}
    room = {name: 40 for name in ("num_pages", "num_slots") if name in plan}
    return family, definition, family.inputs(definition, {**plan, **chosen, **room, "logits": logits}, 3, "cpu")


def rows_of(definition, inputs):
    """(query, keys, values) of each query, in order: the keys that it sees, all float64."""
    q = inputs["q"].double()
    offsets = inputs.get("qo_indptr", torch.arange(len(q) + 1)).tolist()
    window = definition.const_axes.get("window_size", 10**9)
    starts = inputs["kv_indptr"].tolist()
    for request, (first, end) in enumerate(itertools.pairwise(offsets)):
        own = slice(starts[request], starts[request + 1])
        if "k_buffer" in inputs:
            slots = inputs["kv_indices"][own].long()
            keys, values = (torch.cat((inputs[f"{x}_buffer"][slots], inputs[x][first:end])) for x in "kv")
        elif "k" in inputs:
            keys, values = inputs["k"][own], inputs["v"][own]
        else:
            pages, length = inputs["kv_indices"][own].long(), int(inputs["kv_last_page_len"][request])
            count = (len(pages) - 1) * inputs["k_cache"].shape[1] + length if len(pages) else 0
            keys, values = (inputs[f"{x}_cache"][pages].flatten(0, 1)[:count] for x in "kv")
        for row in range(first, end):
            last = len(keys) - (end - row) + 1 if "qo_indptr" in inputs else len(keys)
            seen = slice(max(0, last - window), max(0, last))
            yield q[row], keys[seen].double(), values[seen].double()


def by_loops(definition, inputs, tanh=torch.tanh, weigh=lambda p: p):
    """Output and base-2 lse, a query and a head at a time; `weigh` rounds the weights of the values."""
    cap, outputs, lses = definition.const_axes.get("logits_soft_cap"), [], []
    for query, keys, values in rows_of(definition, inputs):
        for head, own in enumerate(query):
            shared = head // (len(query) // definition.const_axes["num_kv_heads"])
            logits = keys[:, shared] @ own * float(inputs["sm_scale"])
            logits = cap * tanh(logits / cap) if cap else logits
            sink = inputs["sinks"][head : head + 1].double() if "sinks" in inputs else logits[:0]
            every = torch.cat([logits, sink])
            lse = torch.logsumexp(every, 0) if len(every) else torch.tensor(-math.inf, dtype=torch.float64)
            top = logits.amax() if len(logits) else lse
            weights = weigh(torch.exp(logits - top)) * torch.exp(top - lse) if len(logits) else logits
            outputs.append(weights @ values[:, shared])
            lses.append(lse * math.log2(math.e))
    shape = inputs["q"].shape
    return torch.stack(outputs).view(*shape[:2], -1), torch.stack(lses).view(shape[:2])


def test_every_variant_has_a_definition():
    assert len(FIRST) == 18


@pytest.mark.parametrize("logits", ["normal", "large"])
@pytest.mark.parametrize("name", FIRST)
def test_oracle_and_reference_are_what_loops_give(name, logits):
    family, definition, inputs = case(name, logits)
    expected = family.oracle(definition, inputs)
    output, lse = by_loops(definition, inputs)
    torch.testing.assert_close(expected["output"].value, output, rtol=1e-10, atol=1e-12)
    if not name.startswith(EXTEND):
        torch.testing.assert_close(expected["lse"].value, lse, rtol=1e-10, atol=1e-10)
    comparisons = evaluate(family.policies(), reference_outputs(definition, inputs, 3), expected)
    assert all(comparison.passed for comparison in comparisons.values())


def approximate_tanh(error):
    """tanh with this relative error, up or down from logit to logit."""

    def tanh(x):
        return torch.tanh(x) * (1 + error * torch.where(torch.arange(len(x)) % 3 == 1, -1.0, 1.0))

    return tanh


@pytest.mark.parametrize(("error", "accepted"), [(2.0**-11, True), (2.0**-5, False)])
@pytest.mark.parametrize("name", [name for name in FIRST if "softcap" in name and not name.startswith(EXTEND)])
def test_bounds_of_kernels_allow_for_the_error_of_tanh_approx(name, error, accepted):
    family, definition, inputs = case(name, "large", kv_lens=[9, 7, 6, 4, 71])
    output, lse = by_loops(definition, inputs, approximate_tanh(error), lambda p: p.bfloat16().double())
    found = {"output": output.bfloat16(), "lse": lse.float()}
    expected = family.oracle(definition, inputs)
    for kernel in family.kernels:
        if kernel.variant != kernels.CUDA_CORES.name and kernel.library != "sglang":
            passed = [comparison.passed for comparison in evaluate(family.policies(kernel), found, expected).values()]
            assert all(passed) == accepted


def sigmoid_tanh(error):
    """2 sigmoid(2 x) - 1, where sigmoids have this absolute error, up or down from logit to logit."""

    def tanh(x):
        return 2 * (torch.sigmoid(2 * x) + error * torch.where(torch.arange(len(x)) % 3 == 1, -1.0, 1.0)) - 1

    return tanh


@pytest.mark.parametrize(("error", "accepted"), [(6.5 * 2.0**-24, True), (2.0**-9, False)])
@pytest.mark.parametrize("name", [name for name in FIRST if "softcap" in name and name.startswith(EXTEND)])
def test_bounds_of_prefill_kernels_allow_for_the_error_of_sigmoid(name, error, accepted):
    family, definition, inputs = case(name, "large")
    output, _ = by_loops(definition, inputs, sigmoid_tanh(error), lambda p: p.bfloat16().double())
    kernel = next(one for one in family.kernels if one.library == "sglang")  # FlashAttention 3 has tanh.approx
    comparisons = evaluate(family.policies(kernel), {"output": output.bfloat16()}, family.oracle(definition, inputs))
    assert comparisons["output"].passed == accepted


@pytest.mark.parametrize(
    ("logits", "sink", "accepted"),
    [
        ("uniform", 100.0, True),
        ("uniform", 88.0, True),
        ("uniform", 87.0, False),
        ("uniform", 60.0, False),
        ("vast", -1e6, False),
    ],
)
@pytest.mark.parametrize("name", [name for name in FIRST if "sinks" in name])
def test_outputs_may_be_zero_only_where_float32_has_no_numbers_for_the_weights(name, logits, sink, accepted):
    """Beside keys whose logits are 0: exp(-88) is below 2^-126, and exp(-87) is not. Or one key outweighs all else."""
    family, definition, inputs = case(name, logits)
    inputs["sinks"][0] = sink
    expected = family.oracle(definition, inputs)
    assert 0 < float(expected["output"].value[:, 0].abs().max()) < math.exp(8 - max(sink, 0))
    exact = {name: one.value.to(DTYPES[name]) for name, one in expected.items()}
    nothing = exact["output"].index_fill(1, torch.tensor([0]), 0.0)
    for kernel in family.kernels:
        policies = family.policies(kernel)
        assert evaluate(policies, exact, expected)["output"].passed
        assert evaluate(policies, {**exact, "output": nothing}, expected)["output"].passed == accepted, kernel.label


@pytest.mark.parametrize(("above", "accepted"), [(200.0, True), (60.0, False)])
def test_an_infinite_lse_is_accepted_only_where_the_exponential_of_the_sink_overflows(above, accepted):
    """`above`: by how many nats each sink exceeds the largest logit of its head, so exp is 2^289 or 2^87."""
    name = "gqa_paged_decode_sinks"
    family, definition, inputs = case(name, kv_lens=[3, 5])
    inputs["sinks"] = torch.full_like(inputs["sinks"], 0.0)
    largest = max(float((keys @ q.T).max()) for q, keys, _ in rows_of(definition, inputs)) * float(inputs["sm_scale"])
    inputs["sinks"] += largest + above
    [kernel] = [each for each in family.kernels if each.path.startswith("sgl_kernel.flash_attn")]
    policy = kernel.compare["lse"]
    expected = family.oracle(definition, inputs)["lse"]
    right = expected.value.float()
    assert policy.compare(right, expected).passed
    assert policy.compare(torch.full_like(right, math.inf), expected).passed == accepted
    assert not policy.compare(torch.full_like(right, -math.inf), expected).passed
    assert not policy.compare(right * 1.01, expected).passed


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"logits_soft_cap": 16}, [name for name in FIRST if "softcap" in name]),
        ({"window_size": 7}, [name for name in FIRST if "window" in name]),
    ],
    ids=["another cap", "a key more"],
)
def test_another_cap_or_window_is_rejected(change, names):
    for name in names:
        family, definition, inputs = case(name, "large")
        output, lse = by_loops(definition.with_const_axes({**definition.const_axes, **change}), inputs)
        expected = family.oracle(definition, inputs)
        found = {key: value for key, value in (("output", output.bfloat16()), ("lse", lse.float())) if key in expected}
        for kernel in family.kernels:
            comparisons = evaluate(family.policies(kernel), found, expected)
            assert not comparisons["output"].passed, (name, kernel.label)


def test_the_window_of_a_wrapper_does_not_count_the_own_key():
    definition = FIRST["gqa_paged_decode_softcap_window"]
    sized = definition.with_const_axes({**definition.const_axes, "window_size": 4096, "logits_soft_cap": 50})
    assert kernels.masking(sized) == {"window_left": 4095, "logits_soft_cap": 50.0}
    assert kernels.masking(flashinfer_trace.load("gqa_paged_decode_h32_kv8_d128_ps64")) == {}


@pytest.mark.parametrize("name", [name for name in FIRST if "sinks" in name and not name.startswith(EXTEND)])
def test_every_query_of_a_kernel_that_needs_keys_sees_one(name):
    """Among all that hypothesis draws at real sizes, many requests, some of them without queries."""
    request = PlanRequest(FIRST[name], {"total_q": (1, 1 << 30)}, True, SINKS_NEED_KEYS)
    plans = drawn(family_of(FIRST[name]).plans(request))
    pairs = [pair for p in plans for pair in zip(p.get("q_lens", itertools.repeat(1)), p["kv_lens"], strict=False)]
    assert len(pairs) > 1000 and all(kv >= q for q, kv in pairs)
    assert any(q == 0 for q, _ in pairs) == ("q_lens" in plans[0])


@pytest.mark.parametrize("name", [name for name in FIRST if "sinks" in name and not name.startswith(EXTEND)])
def test_the_wrapper_of_sinks_gets_its_arguments(name, monkeypatch):
    family, definition, inputs = case(name, kv_lens=[9, 7, 6, 4, 71], q_lens=[3, 2, 1, 4, 70])
    window = definition.const_axes.get("window_size", 0) - 1

    class BatchAttentionWithAttentionSinkWrapper:
        def __init__(self, workspace, **options):
            assert options["head_dim_qk"] == options["head_dim_vo"] == definition.const_axes["head_dim"]
            assert options["window_left"] == window

        def plan(self, qo_indptr, kv_indptr, kv_indices, last_page_len, *sizes, **options):
            assert qo_indptr.dtype == torch.int32 and int(qo_indptr[-1]) == len(inputs["q"])
            assert options["causal"] and options["window_left"] == window
            assert sizes == tuple(definition.const_axes[axis] for axis in variants.SIZES.split())

        def run(self, q, caches, sinks, scale, *, out, lse, return_lse):
            assert torch.equal(sinks, inputs["sinks"]) and scale == inputs["sm_scale"] and return_lse
            found = by_loops(definition, inputs)
            out.copy_(found[0])
            lse.copy_(found[1])

    install(monkeypatch, {variants.SINKS_PLANNED.path: BatchAttentionWithAttentionSinkWrapper})
    kernels.wrapper.cache_clear()
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 16)
    for kernel in (one for one in family.kernels if one.path == variants.SINKS_PLANNED.path):
        found, _ = kernel_outputs(definition, kernel, inputs)
        comparisons = evaluate(family.policies(kernel), found, family.oracle(definition, inputs))
        assert all(comparison.passed for comparison in comparisons.values())
    kernels.wrapper.cache_clear()
