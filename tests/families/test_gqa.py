"""gqa_paged, gqa_ragged and mla_ragged: small cases whose answer is known, and what the plans draw."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import flashinfer_trace
from flashinfer_trace.definition import InputError
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention.cases import LOGIT_KINDS, ROWS_WITHOUT_KEYS
from flashinfer_trace.families.attention.oracle import SMALLEST_CHUNK, partial_outputs
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.verify import prepare, verify

DECODE = ["gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv8_d128_ps64"]
PREFILL = ["gqa_paged_prefill_causal_h32_kv8_d128_ps1", "gqa_paged_prefill_causal_h32_kv8_d128_ps64"]
RAGGED = ["gqa_ragged_prefill_causal_h32_kv8_d128", "mla_ragged_prefill_causal_h16_qk192_vo128"]
PAGED, CAUSAL = DECODE + PREFILL, PREFILL + RAGGED
NAMES = PAGED + RAGGED
PAGES = {"shared_prefix": 0, "num_pages": 60, "unused": "nan"}


def case(name, kv_lens, q_lens=None, seed=3, logits="normal", **plan):
    """(family, twin, inputs) with these lengths."""
    family = family_of(flashinfer_trace.load(name))
    definition = prepare(flashinfer_trace.load(name), family, "cpu", full=False)
    lengths = {"kv_lens": kv_lens, "logits": logits}
    if name not in DECODE:
        lengths["q_lens"] = q_lens or [1] * len(kv_lens)
    pages = PAGES if name in PAGED else {}
    return family, definition, family.inputs(definition, {**pages, **lengths, **plan}, seed, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_twin_meets_the_oracle(name):
    definition = flashinfer_trace.load(name)
    report = verify(definition, family_of(definition), examples=40, seed=11)
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


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("gqa")])
def test_query_heads_share_key_value_heads_in_consecutive_groups(name):
    """Six query heads on two key-value heads: the first three read values of 1, the others values of 2."""
    family, definition, inputs = case(name, [5, 3], [2, 1])
    values = next(inputs[n] for n in ("v_cache", "v") if n in inputs)
    values[..., 0, :], values[..., 1, :] = 1.0, 2.0
    for output in (
        reference_outputs(definition, inputs, 0)["output"],
        family.oracle(definition, inputs)["output"].value,
    ):
        torch.testing.assert_close(output[:, :3].double(), torch.ones_like(output[:, :3]).double())
        torch.testing.assert_close(output[:, 3:].double(), torch.full_like(output[:, 3:], 2.0).double())


def test_two_equal_logits_give_the_mean_of_two_values():
    _, definition, inputs = case(DECODE[0], [2], logits="uniform")
    outputs = reference_outputs(definition, inputs, 0)
    rows = inputs["v_cache"][inputs["kv_indices"].long(), 0].float()
    assert torch.equal(outputs["output"][0], rows.mean(0).bfloat16().repeat_interleave(3, 0))
    assert torch.equal(outputs["lse"], torch.ones(1, 6))  # log2(2 exp(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_without_keys_gives_zero_and_minus_infinity(name):
    family, definition, inputs = case(name, [5, 0, 9], [2, 3, 1])
    if "kv_last_page_len" in inputs:
        assert inputs["kv_last_page_len"].tolist() == [1, 0, 1]
        inputs["kv_last_page_len"][1] = 3  # without pages, it counts for nothing
    rows = slice(1, 2) if name in DECODE else slice(2, 5)
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
    token = (int(inputs["kv_indices"][0]), 0) if name in PREFILL else (0,)
    key, value = (next(inputs[n] for n in (f"{x}_cache", x) if n in inputs)[token] for x in ("k", "v"))
    group = outputs["lse"].shape[1] // key.shape[0]
    assert torch.equal(outputs["output"][2], value.repeat_interleave(group, 0))
    logits = (inputs["q"][2].double() * key.double().repeat_interleave(group, 0)).sum(-1) * inputs["sm_scale"]
    torch.testing.assert_close(outputs["lse"][2].double(), logits / math.log(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PAGED)
def test_what_no_request_has_does_not_matter(name):
    _, definition, inputs = case(name, [3, 5, 8], [2, 2, 2])
    assert inputs["k_cache"].isnan().any()
    assert inputs["v_cache"].isnan().any()
    outputs = reference_outputs(definition, inputs, 0)
    assert outputs["output"].isfinite().all()
    clean = {n: t.nan_to_num(7.0) if n.endswith("cache") else t for n, t in inputs.items()}
    for output, value in reference_outputs(definition, clean, 0).items():
        assert torch.equal(value, outputs[output])


def test_shared_pages_are_read_by_every_request_that_names_them():
    _, definition, inputs = case(DECODE[1], [11, 9, 3], shared_prefix=2)
    first, second = (inputs["kv_indices"][a:b] for a, b in ((0, 3), (3, 6)))
    assert first[:2].tolist() == second[:2].tolist()
    assert first[2] != second[2]
    unused = [page for page in range(60) if page not in inputs["kv_indices"].tolist()][:2]
    copied = {name: value.clone() if torch.is_tensor(value) else value for name, value in inputs.items()}
    for cache in ("k_cache", "v_cache"):
        copied[cache][unused] = inputs[cache][second[:2].long()]
    copied["kv_indices"][3:5] = torch.tensor(unused)
    for output, value in reference_outputs(definition, copied, 0).items():
        assert torch.equal(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize("paged", PREFILL)
def test_pages_and_ragged_tensors_give_the_same(paged):
    kv_lens, q_lens = [11, 0, 4, 1], [3, 1, 5, 1]
    _, definition, inputs = case(paged, kv_lens, q_lens)
    _, ragged, _ = case(RAGGED[0], kv_lens, q_lens)
    page_size, pages = definition.const_axes["page_size"], inputs["kv_indptr"].tolist()
    slots = [
        int(inputs["kv_indices"][pages[b] + j // page_size]) * page_size + j % page_size
        for b, kv_len in enumerate(kv_lens)
        for j in range(kv_len)
    ]
    own = {**inputs, "kv_indptr": torch.tensor([0, 11, 11, 15, 16], dtype=torch.int32)}
    own |= {name: inputs[f"{name}_cache"].flatten(0, 1)[slots] for name in ("k", "v")}
    own = {name: own[name] for name in ragged.inputs}
    ragged.check_inputs(own)
    for output, value in reference_outputs(ragged, own, 0).items():
        assert torch.equal(value, reference_outputs(definition, inputs, 0)[output])


@pytest.mark.parametrize("name", CAUSAL)
def test_blocks_of_queries_do_not_change_the_result(name):
    _, definition, inputs = case(name, [30, 5], [9, 3])
    assert "2**25" in definition.reference
    blocks = replace(definition, reference=definition.reference.replace("2**25", "400"))
    for output, value in reference_outputs(blocks, inputs, 0).items():
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
        (RAGGED[0], {"len_indptr": 4, "total_q": 9, "total_kv": 30}),
        (RAGGED[1], {"total_q": 5, "total_kv": 0}),
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


@pytest.mark.parametrize(
    ("name", "axes"),
    [(DECODE[1], {"batch_size": 2, "len_indptr": 2}), (DECODE[1], {"num_pages": 0, "num_kv_indices": 3})],
)
def test_impossible_axes_are_refused(name, axes):
    definition = flashinfer_trace.load(name)
    with pytest.raises(InputError):
        family_of(definition).inputs_for_axes(definition, axes, seed=1, device="cpu")


def drawn(name, limits, count=300):
    """Plans of a family's twin."""
    family = family_of(flashinfer_trace.load(name))
    definition = prepare(flashinfer_trace.load(name), family, "cpu", full=False)
    plans = []

    @hypothesis.settings(max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(5)
    @hypothesis.given(family.plans(PlanRequest(definition, limits, large=False)))
    def collect(plan):
        plans.append(plan)

    collect()
    return definition, plans


@pytest.mark.parametrize("name", NAMES)
def test_plans_draw_the_awkward_cases(name):
    definition, plans = drawn(name, {})
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


@pytest.mark.parametrize("name", CAUSAL)
def test_plans_keep_the_limits_of_a_kernel(name):
    kernel = next(k for k in family_of(flashinfer_trace.load(name)).kernels if ROWS_WITHOUT_KEYS in k.limits)
    _, plans = drawn(name, kernel.limits)
    pairs = [pair for p in plans for pair in zip(p["q_lens"], p["kv_lens"], strict=True)]
    assert not [pair for pair in pairs if 0 < pair[1] < pair[0]], "rows without keys beside others"
    assert any(kv == 0 < q for q, kv in pairs), "requests without keys are still drawn"
    assert all(sum(p["q_lens"]) and sum(p["kv_lens"]) for p in plans)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    st.integers(1, 700), st.sampled_from([1, 4, 16, 64]), st.integers(0, 300), st.booleans(), st.integers(0, 99)
)
def test_the_bound_of_partial_outputs_holds_for_every_chunk_length(count, page_size, more, positive, seed):
    """Chunks of at least SMALLEST_CHUNK tokens, in whole pages."""
    chunk = SMALLEST_CHUNK + more // page_size * page_size
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(3 * torch.randn(2, 3, count, generator=generator, dtype=torch.float64), -1)
    values = torch.randn(2, count, 4, generator=generator, dtype=torch.float64)
    values = values.abs() if positive else values
    bound = partial_outputs(p, values, page_size)
    assert (bound <= p @ values.abs() + 1e-12).all()
    chunks = zip(p.split(chunk, -1), values.split(chunk, 1), strict=True)
    partial = torch.stack([part @ own for part, own in chunks]).abs().sum(0)
    assert (partial <= bound + 1e-12).all() or count <= chunk
    assert (bound == 0).all() == (count <= SMALLEST_CHUNK)


def test_pages_sharpen_the_bound_of_partial_outputs():
    p = torch.full((1, 1, 2048), 1 / 2048, dtype=torch.float64)
    values = torch.randn(1, 2048, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by_token, by_page = partial_outputs(p, values), partial_outputs(p, values, 64)
    assert (by_page < by_token).all()
    assert by_page.mean() < 0.2 * (p @ values.abs()).mean()


def test_definitions_load_in_flashinfer_bench_with_its_names():
    bench = pytest.importorskip("flashinfer_bench.data", reason="pip install --no-deps flashinfer-bench==0.1.2")
    heads = ["num_qo_heads", "num_kv_heads", "head_dim"]
    names = {
        "gqa_paged_decode_h32_kv8_d128_ps1": ["q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale"],
        "gqa_paged_prefill_causal_h32_kv8_d128_ps1": [
            *("q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "sm_scale"),
        ],
        "gqa_ragged_prefill_causal_h32_kv8_d128": ["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"],
        "mla_ragged_prefill_causal_h16_qk192_vo128": ["q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"],
    }
    for name, inputs in names.items():
        path = flashinfer_trace.load(name).path
        assert path is not None
        loaded = bench.Definition(**json.loads(path.read_text()))
        assert list(loaded.inputs) == inputs
        assert list(loaded.outputs) == ["output", "lse"]
        assert set(heads) <= set(loaded.const_axes) or loaded.op_type == "mla_ragged"
