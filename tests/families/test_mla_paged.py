"""mla_paged: small cases whose answer is known, and a model of flashinfer's kernels against their bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.definition import InputError
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention.paged_cases import kv_lengths
from flashinfer_trace.families.attention.cases import LOGIT_KINDS
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.verify import prepare, verify

NAMES = [
    f"mla_paged_{stage}_h16_ckv512_kpe64_ps{page_size}"
    for stage in ("decode", "prefill_causal")
    for page_size in (1, 64)
]
PLAN = {"shared_prefix": 0, "num_pages": 60, "logits": "normal", "unused": "nan"}


def case(name, kv_lens, q_lens=None, seed=3, **plan):
    """(family, twin, inputs) with these lengths."""
    family = family_of(flashinfer_trace.load(name))
    definition = prepare(flashinfer_trace.load(name), family, "cpu", full=False)
    lengths = {"kv_lens": kv_lens} if "decode" in name else {"kv_lens": kv_lens, "q_lens": q_lens or [1] * len(kv_lens)}
    return family, definition, family.inputs(definition, {**PLAN, **lengths, **plan}, seed, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_twin_meets_the_oracle(name):
    definition = flashinfer_trace.load(name)
    report = verify(definition, family_of(definition), examples=25, seed=11)
    assert report.status == "passed", report.message


@pytest.mark.parametrize("logits", ["normal", "large", "positive"])
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_rejects_every_mutant(name, logits):
    family, definition, inputs = case(name, [7, 0, 16, 1], [3, 1, 2, 2], logits=logits)
    other = case(name, [7, 0, 16, 1], [3, 1, 2, 2], seed=4, logits=logits)[2]
    expected = family.oracle(definition, inputs)
    outputs, stale = (reference_outputs(definition, i, 0) for i in (inputs, other))
    for kernel in (None, *family.kernels):
        policies = family.policies(kernel)
        assert all(c.passed for c in evaluate(policies, outputs, expected).values())
        for output, want in expected.items():
            for mutant in policies[output].mutants(want):
                wrong = mutant.applied(outputs[output], stale[output])
                assert wrong is not None, f"{mutant.name} does not apply to {output}"
                assert not policies[output].compare(wrong, want).passed, f"{kernel}: {output}, {mutant.name}"


def test_two_equal_keys_give_the_mean_of_their_values():
    _, definition, inputs = case("mla_paged_decode_h16_ckv512_kpe64_ps1", [2], logits="uniform")
    outputs = reference_outputs(definition, inputs, 0)
    rows = inputs["ckv_cache"][inputs["kv_indices"].long(), 0].float()
    assert torch.equal(outputs["output"][0], rows.mean(0).bfloat16().expand(4, -1))
    assert torch.equal(outputs["lse"], torch.ones(1, 4))  # log2(2 exp(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_without_keys_gives_zero_and_minus_infinity(name):
    family, definition, inputs = case(name, [5, 0, 9], [2, 3, 1])
    if "kv_last_page_len" in inputs:
        assert inputs["kv_last_page_len"].tolist() == [1, 0, 1]
        inputs["kv_last_page_len"][1] = 3  # without pages, it counts for nothing
    assert kv_lengths(inputs, definition.const_axes["page_size"]).tolist() == [5, 0, 9]
    rows = slice(1, 2) if "decode" in name else slice(2, 5)
    outputs, expected = reference_outputs(definition, inputs, 0), family.oracle(definition, inputs)
    for result in (outputs, {output: want.value for output, want in expected.items()}):
        assert (result["output"][rows] == 0).all()
        assert (result["lse"][rows] == -math.inf).all()
        assert result["lse"].isfinite().sum() == result["lse"].numel() - 4 * (rows.stop - rows.start)


@pytest.mark.parametrize("name", NAMES[2:])
def test_causal_rows_see_the_keys_up_to_their_own(name):
    """4 queries on 2 keys: two rows see nothing, the third the first key, the fourth both."""
    _, definition, inputs = case(name, [2], [4])
    outputs = reference_outputs(definition, inputs, 0)
    assert (outputs["output"][:2] == 0).all()
    assert (outputs["lse"][:2] == -math.inf).all()
    page = int(inputs["kv_indices"][0])
    assert torch.equal(outputs["output"][2], inputs["ckv_cache"][page, 0].expand(4, -1))
    assert outputs["lse"][2:].isfinite().all()
    q = torch.cat([inputs["q_nope"], inputs["q_pe"]], -1)[2].double()
    key = torch.cat([inputs["ckv_cache"], inputs["kpe_cache"]], -1)[page, 0].double()
    torch.testing.assert_close(
        outputs["lse"][2].double(), q @ key * inputs["sm_scale"] / math.log(2), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_no_request_has_does_not_matter(name):
    _, definition, inputs = case(name, [3, 5, 8], [2, 2, 2])
    assert inputs["ckv_cache"].isnan().any()
    outputs = reference_outputs(definition, inputs, 0)
    assert outputs["output"].isfinite().all()
    clean = {n: t.nan_to_num(7.0) if n.endswith("cache") else t for n, t in inputs.items()}
    for output, value in reference_outputs(definition, clean, 0).items():
        assert torch.equal(value, outputs[output])


def test_shared_pages_are_read_by_every_request_that_names_them():
    name = "mla_paged_decode_h16_ckv512_kpe64_ps64"
    _, definition, inputs = case(name, [11, 9, 3], shared_prefix=2)
    first, second, _ = (inputs["kv_indices"][a:b] for a, b in ((0, 3), (3, 6), (6, 7)))
    assert first[:2].tolist() == second[:2].tolist()
    assert first[2] != second[2]
    copied = dict(inputs)
    copied["kv_indices"] = inputs["kv_indices"].clone()
    unused = [page for page in range(60) if page not in inputs["kv_indices"].tolist()][:2]
    for cache in ("ckv_cache", "kpe_cache"):
        copied[cache] = inputs[cache].clone()
        copied[cache][unused] = inputs[cache][second[:2].long()]
    copied["kv_indices"][3:5] = torch.tensor(unused)
    for output, value in reference_outputs(definition, copied, 0).items():
        assert torch.equal(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize("stage", ["decode", "prefill_causal"])
def test_page_size_does_not_change_the_result(stage):
    name = f"mla_paged_{stage}_h16_ckv512_kpe64_ps"
    kv_lens, q_lens = [11, 0, 4, 1], [3, 1, 5, 1]
    _, paged, inputs = case(name + "64", kv_lens, q_lens)
    _, single, _ = case(name + "1", kv_lens, q_lens)
    tokens = {n: inputs[n].flatten(0, 1).unsqueeze(1) for n in ("ckv_cache", "kpe_cache")}
    pages = inputs["kv_indptr"].tolist()
    slots = [
        int(inputs["kv_indices"][pages[b] + j // 4]) * 4 + j % 4
        for b, kv_len in enumerate(kv_lens)
        for j in range(kv_len)
    ]
    one = {
        **inputs,
        **tokens,
        "kv_indices": torch.tensor(slots, dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 11, 11, 15, 16], dtype=torch.int32),
    }
    one = {n: one[n] for n in single.inputs}
    single.check_inputs(one)
    for output, value in reference_outputs(single, one, 0).items():
        assert torch.equal(value, reference_outputs(paged, inputs, 0)[output])


def test_blocks_of_queries_do_not_change_the_result():
    _, definition, inputs = case(NAMES[3], [30, 5], [9, 3])
    assert "2**25" in definition.reference
    blocks = replace(definition, reference=definition.reference.replace("2**25", "250"))
    for output, value in reference_outputs(blocks, inputs, 0).items():
        torch.testing.assert_close(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        (NAMES[0], {"batch_size": 3, "num_kv_indices": 17, "num_pages": 20}),
        (NAMES[0], {"num_kv_indices": 17, "num_pages": 5}),
        (NAMES[1], {"batch_size": 0}),
        (NAMES[1], {"len_indptr": 8, "num_kv_indices": 11}),
        (NAMES[1], {"num_pages": 0}),
        (NAMES[2], {"len_indptr": 4, "total_q": 9, "num_kv_indices": 30}),
        (NAMES[3], {"batch_size": 2, "total_q": 0, "num_pages": 100}),
    ],
)
def test_axes_of_a_user_are_honoured(name, axes):
    family = family_of(flashinfer_trace.load(name))
    definition = prepare(flashinfer_trace.load(name), family, "cpu", full=False)
    inputs = family.inputs_for_axes(definition, axes, seed=1, device="cpu")
    actual = definition.bind_axes(inputs)
    assert {axis: actual[axis] for axis in axes} == axes
    policies = evaluate(family.policies(), reference_outputs(definition, inputs, 0), family.oracle(definition, inputs))
    assert all(c.passed for c in policies.values())


@pytest.mark.parametrize("axes", [{"batch_size": 2, "len_indptr": 2}, {"num_pages": 0, "num_kv_indices": 3}])
def test_impossible_axes_are_refused(axes):
    definition = flashinfer_trace.load(NAMES[1])
    with pytest.raises(InputError):
        family_of(definition).inputs_for_axes(definition, axes, seed=1, device="cpu")


def kernel_model(inputs, page_size, rounds_sum, chunk, tile=16):
    """flashinfer's MLA kernels in float32, as their source has it: keys split into chunks whose outputs are stored in
    bf16, tiles from last to first with a running maximum, weights rounded to bf16 for the product with the values and
    (fa2, `rounds_sum`) for their own sum, -5e4 for masked logits and for the maximum of nothing.
    """
    queries = torch.cat([inputs["q_nope"], inputs["q_pe"]], -1).float()
    cache, dim = torch.cat([inputs["ckv_cache"], inputs["kpe_cache"]], -1).flatten(0, 1), inputs["q_nope"].shape[-1]
    rows = inputs["qo_indptr"].tolist() if "qo_indptr" in inputs else list(range(queries.shape[0] + 1))
    pages, lengths = inputs["kv_indptr"].tolist(), kv_lengths(inputs, page_size).tolist()
    output, lse = torch.zeros_like(inputs["q_nope"]), torch.full(queries.shape[:2], -math.inf)
    scale = torch.tensor(inputs["sm_scale"]) * torch.tensor(math.log2(math.e))
    for b, kv_len in enumerate(lengths):
        q_len, position = rows[b + 1] - rows[b], torch.arange(kv_len)
        if not kv_len or not q_len:
            continue
        slots = inputs["kv_indices"][pages[b] + position // page_size] * page_size + position % page_size
        keys = cache[slots.long()].float()
        logits = queries[rows[b] : rows[b + 1]] @ keys.T
        limit = kv_len - q_len + torch.arange(q_len)
        logits = logits.masked_fill((position > limit[:, None])[:, None], -5e4)
        merged = torch.zeros(*logits.shape[:2], dim), torch.full((*logits.shape[:2], 1), -5e4), torch.ones(1)
        for start in range(0, kv_len, chunk):
            stop = min(start + chunk, kv_len)
            o, m, d = torch.zeros_like(merged[0]), torch.full_like(merged[1], -5e4), torch.ones_like(merged[1])
            for first in reversed(range(start, stop, tile)):
                part = slice(first, min(first + tile, stop))
                new = m.maximum(logits[..., part].amax(-1, keepdim=True))
                p, rescale = torch.exp2(logits[..., part] * scale - new * scale), torch.exp2(m * scale - new * scale)
                rounded = p.bfloat16().float()
                d = d * rescale + (rounded if rounds_sum else p).sum(-1, keepdim=True)
                o, m = o * rescale + rounded @ keys[part, :dim], new
            nothing = m == -5e4
            o, part_lse = torch.where(nothing, 0, o / d), torch.where(nothing, -math.inf, torch.log2(d) + m * scale)
            if chunk >= kv_len:
                merged = o, part_lse, torch.ones(1)
                continue
            top = merged[1].maximum(part_lse)
            old, own = torch.exp2(merged[1] - top), torch.exp2(part_lse - top)
            merged = merged[0] * old + o.bfloat16().float() * own, top, merged[2] * old + own
        output[rows[b] : rows[b + 1]] = (merged[0] / merged[2]).bfloat16()
        total = (merged[1] + torch.log2(merged[2])).squeeze(-1)
        lse[rows[b] : rows[b + 1]] = torch.where(total == -5e4, -math.inf, total)
    return {"output": output, "lse": lse}


@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("logits", LOGIT_KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_bounds_of_the_kernels_hold_for_a_model_of_them(name, logits, chunk):
    """And they are not idle: outputs use a good part of theirs, and fa2's lse is too coarse for fa3's bound."""
    family, definition, inputs = case(name, [70, 0, 130, 33, 2], [3, 1, 2, 5, 4], num_pages=300, logits=logits)
    expected = family.oracle(definition, inputs)
    fa2, fa3 = family.kernels
    for kernel, rounds_sum in ((fa2, True), (fa3, False)):
        outputs = kernel_model(inputs, definition.const_axes["page_size"], rounds_sum, chunk)
        for output, comparison in evaluate(family.policies(kernel), outputs, expected).items():
            assert comparison.passed, f"{kernel.label}: {output}: {comparison}"
            assert comparison.ratio > (0.2 if output == "output" else 1e-4), f"{kernel.label}: {output}: {comparison}"
        if logits == "normal":
            assert evaluate(family.policies(fa3), outputs, expected)["lse"].passed == (not rounds_sum)
