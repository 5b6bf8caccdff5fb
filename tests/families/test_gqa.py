"""Grouped-query attention: which heads share keys, the bound on partial outputs, and its Definitions."""

from __future__ import annotations

import json
from collections import Counter

import hypothesis
import pytest
import torch
from attention_cases import DECODE, PREFILL, RAGGED, case
from hypothesis import strategies as st

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.attention.kernels import last_page_len
from flashinfer_trace.families.attention.oracle import SMALLEST_CHUNK, partial_outputs
from flashinfer_trace.harness.case import reference_outputs


@pytest.mark.parametrize("name", [*DECODE, *PREFILL, RAGGED[0]])
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
    bound = partial_outputs(p, values, torch.tensor([count]), page_size)
    assert (bound <= p @ values.abs() + 1e-12).all()
    chunks = zip(p.split(chunk, -1), values.split(chunk, 1), strict=True)
    partial = torch.stack([part @ own for part, own in chunks]).abs().sum(0)
    assert (partial <= bound + 1e-12).all() or count <= chunk
    assert (bound == 0).all() == (count <= SMALLEST_CHUNK)


def test_pages_sharpen_the_bound_of_partial_outputs():
    p = torch.full((1, 1, 2048), 1 / 2048, dtype=torch.float64)
    values = torch.randn(1, 2048, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by_token, by_page = (partial_outputs(p, values, torch.tensor([2048]), page_size) for page_size in (1, 64))
    assert (by_page < by_token).all()
    assert by_page.mean() < 0.2 * (p @ values.abs()).mean()


def test_decode_on_cuda_cores_is_for_the_groups_it_is_compiled_for():
    for heads, groups in {
        "h32_kv8": True,
        "h64_kv8": True,
        "h28_kv4": False,
        "h48_kv8": False,
        "h128_kv8": False,
    }.items():
        definition = flashinfer_trace.load(f"gqa_paged_decode_{heads}_d128_ps1")
        labels = [k.variant for k in family_of(definition).kernels_of(definition) if k.library == "flashinfer-python"]
        assert labels == (["CUDA cores"] if groups else []) + ["fa2", "fa3"]


#: Sizes whose models have tags from dry runs alone, which name the calls of a run; not all five kinds of attention.
OF_DRY_RUNS = {
    "gqa_paged_prefill_causal_h40_kv10_d128_ps1": "phi-4",
    "gqa_paged_decode_h20_kv5_d128_ps1": "phi-4",
    "gqa_paged_prefill_causal_h20_kv5_d128_ps1": "phi-4",
    "gqa_paged_decode_h8_kv1_d128_ps128": "minimax-m3",  # pages of 128 tokens
}


def test_every_definition_has_the_heads_that_its_models_and_tp_give():
    """48 heads at TP 8 are 6 that share one; 28 heads allow no TP 8; 4 key-value heads at TP 8 are copied."""
    plain = {"gqa_paged_decode", "gqa_paged_prefill_causal", "gqa_ragged_prefill_causal"}
    of_models = [
        one
        for one in flashinfer_trace.definitions()
        if one.tag_values("model") and family_of(one).name.removesuffix("_ps1") in plain
    ]
    found = {(d.const_axes["num_qo_heads"], d.const_axes["num_kv_heads"]): d for d in of_models
             if d.op_type == "gqa_ragged"}  # fmt: skip
    assert (6, 1) in found
    assert {h for h, _ in found if h % 7 == 0} == {28, 14, 7}
    assert "model:qwen3-30b-a3b" in found[4, 1].tags
    assert {d.name: d.tag_values("model") for d in of_models if d.name in OF_DRY_RUNS} == {
        name: [model] for name, model in OF_DRY_RUNS.items()
    }
    others = [d for d in of_models if d.name not in OF_DRY_RUNS]
    for op_type, count in {"gqa_paged": 4, "gqa_ragged": 1}.items():
        heads = Counter(
            (d.const_axes["num_qo_heads"], d.const_axes["num_kv_heads"]) for d in others if d.op_type == op_type
        )
        assert heads == dict.fromkeys(found, count)
        assert len([d for d in others if d.op_type == op_type]) == count * len(found)


def test_last_pages_are_empty_without_pages():
    inputs = {
        "kv_indptr": torch.tensor([0, 2, 2, 3], dtype=torch.int32),
        "kv_last_page_len": torch.tensor([3, 2, 1], dtype=torch.int32),
    }
    assert last_page_len(inputs).tolist() == [3, 0, 1]
    del inputs["kv_last_page_len"]
    assert last_page_len(inputs).tolist() == [1, 0, 1]


def test_definitions_load_in_flashinfer_bench_with_its_names():
    bench = pytest.importorskip("flashinfer_bench.data", reason="pip install --no-deps flashinfer-bench==0.1.2")
    heads = ["num_qo_heads", "num_kv_heads", "head_dim"]
    names = {
        "gqa_paged_decode_h32_kv8_d128_ps1": ["q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale"],
        "gqa_paged_prefill_causal_h32_kv8_d128_ps1": [
            *("q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "sm_scale")
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
