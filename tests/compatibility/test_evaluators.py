"""Our Definitions under flashinfer-bench's own evaluators, on the CPU: what they judge, and what they cannot.

Its evaluators wait for CUDA after each call; that is all that is replaced here. The inputs are ours: its random
generator does not make valid offsets or probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import flashinfer_trace

pytest.importorskip("flashinfer_bench", reason="pip install --no-deps flashinfer-bench==0.1.2")
st = pytest.importorskip("safetensors.torch", reason="flashinfer-bench reads inputs from safetensors files")

from bench_support import Bench, inputs_of  # noqa: E402

ROOT = flashinfer_trace.find_root()


#: One Definition of each family whose references run in moments on a CPU at real size -> var axes of the case.
CASES: Mapping[str, Mapping[str, int]] = {
    "rmsnorm_h4096": {"batch_size": 3},
    "fused_add_rmsnorm_h4096": {"batch_size": 3},
    "rmsnorm_h128": {"batch_size": 3},
    "fused_add_rmsnorm_h2048": {"batch_size": 3},
    "gemm_n128_k2048": {"M": 3},
    "rope_with_cos_sin_cache_neox_style_d128_rd64": {"num_tokens": 3, "max_seq_len": 32},
    "gqa_paged_decode_h16_kv2_d128_ps1": {},
    "gqa_paged_decode_h16_kv2_d128_ps64": {},
    "gqa_paged_decode_h32_kv8_d128_ps1": {},
    "gqa_paged_prefill_causal_h16_kv2_d128_ps1": {},
    "gqa_paged_prefill_causal_h32_kv8_d128_ps64": {},
    "gqa_ragged_prefill_causal_h16_kv2_d128": {},
    "mla_paged_decode_h8_ckv512_kpe64_ps1": {},
    "mla_paged_decode_h16_ckv512_kpe64_ps64": {},
    "mla_paged_prefill_causal_h8_ckv512_kpe64_ps1": {},
    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64": {},
    "mla_ragged_prefill_causal_h8_qk192_vo128": {},
    "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps1": {},
    "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64": {},
}


@pytest.mark.parametrize("name", CASES)
def test_our_reference_is_judged_right_and_a_wrong_one_wrong(name: str, bench: Bench) -> None:
    definition = flashinfer_trace.load(name)
    inputs = inputs_of(definition, CASES[name])
    assert bench.judge(definition, definition.reference, inputs) is None
    wrong = definition.reference + WRONG
    assert bench.judge(definition, wrong, inputs) == "INCORRECT_NUMERICAL"


#: Appended to a reference: the same results, 5 % larger.
WRONG = """

right = run


def run(*inputs):
    results = right(*inputs)
    scaled = [1.05 * one for one in (results if isinstance(results, tuple) else [results])]
    return tuple(scaled) if isinstance(results, tuple) else scaled[0]
"""


@pytest.mark.parametrize("name", ["top_k_renorm_probs_v32000", "top_p_renorm_probs_v32000"])
def test_renormalization_is_judged_by_its_rows(name: str, bench: Bench) -> None:
    """With op_type sampling the evaluator takes the rows for tokens; with our op_type it compares them."""
    definition = flashinfer_trace.load(name)
    inputs = inputs_of(definition, {"batch_size": 2})
    assert bench.judge(definition, definition.reference, inputs) is None
    # atol is 0.01: a wrong row must be wrong by more than that.
    inputs["probs"] = torch.zeros(2, 32000).index_fill_(1, torch.tensor([7, 9]), 0.5)
    assert bench.judge(definition, definition.reference + WRONG, inputs) == "INCORRECT_NUMERICAL"
    as_sampling = {**bench.document(definition), "op_type": "sampling"}
    with pytest.raises(IndexError):
        bench.judge(as_sampling, definition.reference, inputs)


SMALL = 64


def sampler(name: str) -> dict[str, Any]:
    """A sampler's Definition over 64 tokens, so half a million draws take a moment."""
    definition = flashinfer_trace.load(f"{name}_v32000")
    text = definition.path.read_text(encoding="utf-8") if definition.path else ""
    return json.loads(text.replace("32000", str(SMALL)))


ROW = torch.softmax(torch.linspace(0, 4, SMALL), 0).expand(2, SMALL).contiguous()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("top_k_sampling_from_probs", {"top_k": torch.tensor([3, 20], dtype=torch.int32)}),
        ("top_p_sampling_from_probs", {"top_p": torch.tensor([0.5, 0.9])}),
        (
            "top_k_top_p_sampling_from_probs",
            {"top_k": torch.tensor([40, 20], dtype=torch.int32), "top_p": torch.tensor([0.7, 0.9])},
        ),
        ("min_p_sampling_from_probs", {"min_p": torch.tensor([0.0, 0.0])}),
    ],
)
def test_samplers_are_judged_by_their_distribution(name: str, parameters: dict[str, Any], bench: Bench) -> None:
    data = sampler(name)
    assert data["outputs"]["samples"]["dtype"] == "int64"
    inputs = {"probs": ROW, **parameters}
    assert bench.judge(data, data["reference"], inputs) is None
    uniform = "import torch\n\n\ndef run(probs, *parameters):\n    return torch.randint(0, 64, (probs.shape[0],))\n"
    assert bench.judge(data, uniform, inputs) == "INCORRECT_NUMERICAL"


def test_a_right_min_p_sampler_is_rejected_as_the_document_says(bench: Bench) -> None:
    data = sampler("min_p_sampling_from_probs")
    inputs = {"probs": ROW, "min_p": torch.tensor([0.5, 0.5])}
    assert bench.judge(data, data["reference"], inputs) == "INCORRECT_NUMERICAL"


def test_every_result_for_a_row_without_keys_is_rejected_as_the_document_says(bench: Bench) -> None:
    definition = flashinfer_trace.load("gqa_ragged_prefill_causal_h16_kv2_d128")
    inputs = inputs_of(definition, {})
    inputs["qo_indptr"] = torch.tensor([0, 2, 3], dtype=torch.int32)
    inputs["kv_indptr"] = torch.tensor([0, 1, 3], dtype=torch.int32)  # the first of two queries sees no key
    inputs["q"] = torch.randn(3, 16, 128).bfloat16()
    inputs["k"], inputs["v"] = torch.randn(2, 3, 2, 128).bfloat16()
    output, lse = definition.run(**inputs)
    assert (output[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert bench.judge(definition, definition.reference, inputs) == "INCORRECT_NUMERICAL"
    inputs["qo_indptr"] = torch.tensor([0, 1, 3], dtype=torch.int32)  # now every query sees one
    assert bench.judge(definition, definition.reference, inputs) is None


def test_solutions_that_write_into_given_outputs_fit_our_contracts(bench: Bench) -> None:
    """The evaluator allocates outputs by the Definition's dtypes: an int32 token would not fit into int64 samples."""
    definition = flashinfer_trace.load("fused_add_rmsnorm_h4096")
    inputs = inputs_of(definition, {"batch_size": 2})
    outputs = bench.outputs(definition, inputs)
    assert [(tuple(one.shape), one.dtype) for one in outputs] == [((2, 4096), torch.bfloat16)]
    data = sampler("top_k_sampling_from_probs")
    inputs = {"probs": ROW, "top_k": torch.tensor([3, 20], dtype=torch.int32)}
    assert [one.dtype for one in bench.outputs(data, inputs)] == [torch.int64]
