"""All attention families: small cases with known results, and what the plans draw."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import (
    CAUSAL,
    DECODE,
    LATENT_DECODE,
    LATENT_PREFILL,
    NAMES,
    PAGED,
    PREFILL,
    RAGGED,
    caches,
    case,
    drawn,
    keys_and_values,
    queries,
    slots,
)
from drawn_plans import small_twin

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention import oracle
from flashinfer_trace.families.attention.cases import LOGIT_KINDS, AttentionOptions, kv_lengths
from flashinfer_trace.format.definition import InputError
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.job import SMALL_BLOCK
from flashinfer_trace.harness.verify import Job, verify

#: Kernels split the keys that the last query of a block sees, so these depend on the block.
SPLIT_SUMS = {f"gain_{kind}_partial" for kind in ("settled", "worst", "squares")}


@pytest.mark.parametrize("name", NAMES)
def test_twin_meets_the_oracle(name):
    definition = flashinfer_trace.load(name)
    report = verify(Job(definition, family_of(definition)), examples=40, seed=11)
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


@pytest.mark.parametrize("logits", LOGIT_KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_requests_computed_together_come_out_as_one_by_one(name, logits, monkeypatch):
    """All in one batch, and each row of each request on its own; but for the order in which float64 sums are formed."""
    pages = {"num_pages": 600} if name in PAGED else {}
    family, definition, inputs = case(name, [300, 0, 7, 131, 1, 33], [3, 1, 2, 6, 2, 0], logits=logits, **pages)
    found = {}
    for kind, block, overhead in (("together", 2**40, 2**40), ("alone", 1, 0)):
        monkeypatch.setattr(oracle, "BLOCK_ELEMENTS", block)
        monkeypatch.setitem(oracle.BATCH_ELEMENTS, "cpu", overhead)
        found[kind] = family.oracle(definition, inputs)
    for output, together in found["together"].items():
        alone = found["alone"][output]
        torch.testing.assert_close(together.value, alone.value, rtol=1e-12, atol=1e-13)
        for part in together.parts.keys() - {"partial", *SPLIT_SUMS}:
            size = float(together.parts[part].abs().max())
            torch.testing.assert_close(together.parts[part], alone.parts[part], rtol=1e-11, atol=1e-13 * size)


@pytest.mark.parametrize("name", [DECODE[0], LATENT_DECODE[0]])
def test_two_equal_logits_give_the_mean_of_two_values(name):
    _, definition, inputs = case(name, [2], logits="uniform")
    outputs = reference_outputs(definition, inputs, 0)
    rows = keys_and_values(inputs)[1][inputs["kv_indices"].long(), 0].float()
    heads = definition.const_axes["num_qo_heads"]
    assert torch.equal(outputs["output"][0], rows.mean(0).bfloat16().repeat_interleave(heads // rows.shape[1], 0))
    assert torch.equal(outputs["lse"], torch.ones(1, heads))  # log2(2 exp(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_without_keys_gives_zero_and_minus_infinity(name):
    family, definition, inputs = case(name, [5, 0, 9], [2, 3, 1])
    if "kv_last_page_len" in inputs:
        assert inputs["kv_last_page_len"].tolist() == [1, 0, 1]
        inputs["kv_last_page_len"][1] = 3  # must have no effect on a request without pages
    if name in PAGED:
        assert kv_lengths(inputs, definition.const_axes["page_size"]).tolist() == [5, 0, 9]
    rows = slice(2, 5) if name in CAUSAL else slice(1, 2)
    outputs, expected = reference_outputs(definition, inputs, 0), family.oracle(definition, inputs)
    for result in (outputs, {output: want.value for output, want in expected.items()}):
        assert (result["output"][rows] == 0).all()
        assert (result["lse"][rows] == -math.inf).all()
        heads = result["lse"].shape[1]
        assert result["lse"].isfinite().sum() == result["lse"].numel() - heads * (rows.stop - rows.start)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_gives_empty_outputs(name):
    family, definition, inputs = case(name, [])
    for result in (reference_outputs(definition, inputs, 0), family.oracle(definition, inputs)):
        for output in ("output", "lse"):
            value = result[output] if torch.is_tensor(result[output]) else result[output].value
            assert value.shape[0] == 0
            assert value.shape[1] == definition.const_axes["num_qo_heads"]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_rows_see_the_keys_up_to_their_own(name):
    """4 queries on 2 keys: two rows see nothing, the third the first key, the fourth both."""
    _, definition, inputs = case(name, [2], [4])
    outputs = reference_outputs(definition, inputs, 0)
    assert (outputs["output"][:2] == 0).all()
    assert (outputs["lse"][:2] == -math.inf).all()
    assert outputs["lse"][2:].isfinite().all()
    token = (int(inputs["kv_indices"][0]), 0) if name in PAGED else (0,)
    key, value = (x[token] for x in keys_and_values(inputs))
    group = outputs["lse"].shape[1] // key.shape[0]
    assert torch.equal(outputs["output"][2], value.repeat_interleave(group, 0))
    logits = (queries(inputs)[2].double() * key.double().repeat_interleave(group, 0)).sum(-1) * inputs["sm_scale"]
    torch.testing.assert_close(outputs["lse"][2].double(), logits / math.log(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PAGED)
def test_what_no_request_has_does_not_matter(name):
    _, definition, inputs = case(name, [3, 5, 8], [2, 2, 2])
    assert all(inputs[cache].isnan().any() for cache in caches(inputs))
    outputs = reference_outputs(definition, inputs, 0)
    assert outputs["output"].isfinite().all()
    clean = {n: t.nan_to_num(7.0) if n in caches(inputs) else t for n, t in inputs.items()}
    for output, value in reference_outputs(definition, clean, 0).items():
        assert torch.equal(value, outputs[output])


@pytest.mark.parametrize("name", [DECODE[1], LATENT_DECODE[1]])
def test_shared_pages_are_read_by_every_request_that_names_them(name):
    _, definition, inputs = case(name, [11, 9, 3], shared_prefix=2)
    first, second = (inputs["kv_indices"][a:b] for a, b in ((0, 3), (3, 6)))
    assert first[:2].tolist() == second[:2].tolist()
    assert first[2] != second[2]
    unused = [page for page in range(60) if page not in inputs["kv_indices"].tolist()][:2]
    copied = {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
    for cache in caches(inputs):
        copied[cache][unused] = inputs[cache][second[:2].long()]
    copied["kv_indices"][3:5] = torch.tensor(unused)
    for output, value in reference_outputs(definition, copied, 0).items():
        assert torch.equal(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize(("name", "single"), list(zip(PAGED[1::2], PAGED[::2], strict=True)))
def test_page_size_does_not_change_the_result(name, single):
    kv_lens, q_lens = [11, 0, 4, 1], [3, 1, 5, 1]
    _, paged, inputs = case(name, kv_lens, q_lens)
    _, definition = small_twin(single)
    one = {
        **inputs,
        **{cache: inputs[cache].flatten(0, 1).unsqueeze(1) for cache in caches(inputs)},
        "kv_indices": torch.tensor(slots(inputs, paged.const_axes["page_size"], kv_lens), dtype=torch.int32),
        "kv_indptr": torch.tensor([0, 11, 11, 15, 16], dtype=torch.int32),
    }
    one = {name: one[name] for name in definition.inputs}
    definition.check_inputs(one)
    for output, value in reference_outputs(definition, one, 0).items():
        assert torch.equal(value, reference_outputs(paged, inputs, 0)[output])


@pytest.mark.parametrize("paged", PREFILL)
def test_pages_and_ragged_tensors_give_the_same(paged):
    kv_lens, q_lens = [11, 0, 4, 1], [3, 1, 5, 1]
    _, definition, inputs = case(paged, kv_lens, q_lens)
    _, ragged = small_twin(RAGGED[0])
    own_slots = slots(inputs, definition.const_axes["page_size"], kv_lens)
    own = {**inputs, "kv_indptr": torch.tensor([0, 11, 11, 15, 16], dtype=torch.int32)}
    own |= {name: inputs[f"{name}_cache"].flatten(0, 1)[own_slots] for name in ("k", "v")}
    own = {name: own[name] for name in ragged.inputs}
    ragged.check_inputs(own)
    for output, value in reference_outputs(ragged, own, 0).items():
        assert torch.equal(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize("name", CAUSAL)
def test_blocks_of_queries_do_not_change_the_result(name):
    _, definition, inputs = case(name, [30, 5], [9, 3])
    assert SMALL_BLOCK in definition.reference
    whole = replace(definition, reference=definition.reference.replace(SMALL_BLOCK, "QUERY_BLOCK = 64"))
    for output, value in reference_outputs(whole, inputs, 0).items():
        torch.testing.assert_close(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        (DECODE[0], {"batch_size": 3, "num_kv_indices": 17, "num_pages": 20}),
        (DECODE[0], {"num_kv_indices": 17, "num_pages": 5}),
        (DECODE[1], {"batch_size": 0}),
        (DECODE[1], {"len_indptr": 8, "num_kv_indices": 11}),
        (DECODE[1], {"num_pages": 0}),
        (PREFILL[0], {"len_indptr": 4, "total_q": 9, "num_kv_indices": 30}),
        (PREFILL[1], {"batch_size": 2, "total_q": 0, "num_pages": 100}),
        (LATENT_DECODE[0], {"batch_size": 3, "num_kv_indices": 17, "num_pages": 20}),
        (LATENT_DECODE[0], {"num_kv_indices": 17, "num_pages": 5}),
        (LATENT_DECODE[1], {"batch_size": 0}),
        (LATENT_DECODE[1], {"len_indptr": 8, "num_kv_indices": 11}),
        (LATENT_DECODE[1], {"num_pages": 0}),
        (LATENT_PREFILL[0], {"len_indptr": 4, "total_q": 9, "num_kv_indices": 30}),
        (LATENT_PREFILL[1], {"batch_size": 2, "total_q": 0, "num_pages": 100}),
        (RAGGED[0], {"len_indptr": 4, "total_q": 9, "total_kv": 30}),
        (RAGGED[1], {"total_q": 5, "total_kv": 0}),
    ],
)
def test_axes_of_a_user_are_honored(name, axes):
    family, definition = small_twin(name)
    inputs = family.inputs_for_axes(definition, axes, seed=1, device="cpu")
    actual = definition.bind_axes(inputs)
    assert {axis: actual[axis] for axis in axes} == axes
    policies = evaluate(family.policies(), reference_outputs(definition, inputs, 0), family.oracle(definition, inputs))
    assert all(c.passed for c in policies.values())


@pytest.mark.parametrize("axes", [{"batch_size": 2, "len_indptr": 2}, {"num_pages": 0, "num_kv_indices": 3}])
@pytest.mark.parametrize("name", [DECODE[1], LATENT_DECODE[1]])
def test_impossible_axes_are_refused(name, axes):
    definition = flashinfer_trace.load(name)
    with pytest.raises(InputError):
        family_of(definition).inputs_for_axes(definition, axes, seed=1, device="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_plans_draw_the_awkward_cases(name):
    definition, plans = drawn(name)
    page_size = definition.const_axes.get("page_size", 4)
    lengths = [length for plan in plans for length in plan["kv_lens"]]
    needed = {
        "lengths around a page": {page_size - 1, page_size, page_size + 1} <= set(lengths),
        "no keys in the middle": any(0 in p["kv_lens"][1:-1] and any(p["kv_lens"][2:]) for p in plans),
        "every kind of logits": {p["logits"] for p in plans} == set(LOGIT_KINDS),
    }
    if name in PAGED:
        needed["NaN and stale tails"] = {p["unused"] for p in plans} == {"nan", "stale"}
        needed["shared pages"] = any(p["shared_prefix"] and len(p["kv_lens"]) > 1 for p in plans)
    if name in CAUSAL:
        pairs = [pair for p in plans for pair in zip(p["q_lens"], p["kv_lens"], strict=True)]
        needed["more queries than keys"] = any(0 < kv < q for q, kv in pairs)
        needed["as many queries as keys"] = any(0 < kv == q for q, kv in pairs)
        needed["no queries, but keys"] = any(q == 0 < kv for q, kv in pairs)
    assert all(needed.values()), {what for what, found in needed.items() if not found}


@pytest.mark.parametrize("name", PREFILL + RAGGED)
def test_plans_keep_the_limits_of_a_kernel(name):
    family = family_of(flashinfer_trace.load(name))
    kernel = next(k for k in family.kernels if not k.plan_options.unseeing_rows)
    _, plans = drawn(name, kernel)
    pairs = [pair for p in plans for pair in zip(p["q_lens"], p["kv_lens"], strict=True)]
    assert not [pair for pair in pairs if 0 < pair[1] < pair[0]], "rows without keys next to rows with keys"
    assert any(kv == 0 < q for q, kv in pairs), "requests without keys must still be drawn"
    assert all(sum(p["q_lens"]) and sum(p["kv_lens"]) for p in plans)


@pytest.mark.parametrize("name", NAMES)
def test_limits_of_kernels_are_of_variable_axes(name):
    definition = flashinfer_trace.load(name)
    for kernel in family_of(definition).kernels:
        assert set(kernel.limits) <= set(definition.var_axes), kernel.label
        assert isinstance(kernel.plan_options, AttentionOptions)


@pytest.mark.parametrize("name", LATENT_PREFILL)
def test_latent_attention_is_spared_nothing_but_empty_launches(name):
    _, plans = drawn(name, family_of(flashinfer_trace.load(name)).kernels[0])
    assert any(0 < kv < q for p in plans for q, kv in zip(p["q_lens"], p["kv_lens"], strict=True))
    assert all(len(p["kv_lens"]) and sum(p["q_lens"]) and p["num_pages"] for p in plans)
