"""Kernels of DeepSeek that get no Definition: at most two, each with a reason, and none of them has a tag."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from flashinfer_trace import DatasetError, definitions, find_root
from flashinfer_trace.cli import main
from flashinfer_trace.kernel_coverage import NOT_YET, definitions_by_kernel, kernel_coverages
from flashinfer_trace.model_coverage import load_needs
from tools.op_tracing.definitions import covered, functions
from tools.op_tracing.kernel_coverage import without_definition

LISTED = json.loads((find_root() / "traces" / "kernels_without_definition.json").read_text(encoding="utf-8"))
MOST = 2


def test_at_most_two_kernels_get_no_definition_each_for_a_reason():
    assert 0 < len(LISTED["kernels"]) <= MOST
    assert all(reason.endswith(".") and len(reason.split()) > 10 for reason in LISTED["kernels"].values())


def test_no_definition_names_a_kernel_that_is_said_to_have_none():
    tags = {tag.partition(":")[2] for definition in definitions() for tag in definition.tags}
    assert "sgl_kernel.cutlass_mla_decode" in tags
    assert not tags & set(LISTED["kernels"])


def test_every_traced_kernel_has_a_definition_or_a_reason():
    """`not_yet` may only shrink: what it lists is called by a model's code and has no Definition."""
    found = [one for needed in load_needs(find_root()).values() for one in kernel_coverages(find_root(), needed)]
    assert not {one.kernel for one in found if not one.definitions and not one.reason}
    listed = LISTED["not_yet"]
    assert listed == sorted(set(listed))
    called, defined = {one.kernel for one in found}, {one.kernel for one in found if one.definitions}
    assert not set(listed) - called, "no model's code calls these any more"
    assert not set(listed) & defined, "these have Definitions now: remove them"


def test_a_kernel_has_the_definitions_that_tags_and_records_name():
    dataset = list(definitions())
    known = definitions_by_kernel(find_root(), dataset)
    assert "gemm_bf16_n256_k7168" in known["sgl-kernel:dsv3_router_gemm"]
    # A record alone names DeepGEMM's; a wrapper's tag stands for the Triton kernels that it launches.
    assert "fp8_blockwise_scaled_mm_n2112_k7168" in known["deep-gemm:fp8_gemm_nt"]
    assert "mla_paged_decode_h128_ckv512_kpe64_ps1" in known["triton:_fwd_grouped_kernel_stage1"]
    assert known["flashinfer:trtllm_fp4_block_scale_moe"] == [
        "moe_nvfp4_ds_routing_topk8_ng8_kg4_e256_h7168_i256",
        "moe_nvfp4_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",
    ]
    assert "" not in known


def test_kernels_that_run_are_apart_from_those_that_are_only_named():
    dataset = list(definitions())
    runs, every = covered(dataset), definitions_by_kernel(find_root(), dataset)
    # Of each library: by a tag, by a record alone, and by the function that launches it.
    assert "store_cache_d1024" in runs["jit:store_cache"]
    assert runs["deep-gemm:fp8_mqa_logits"] == ["fp8_mqa_logits_h64_d128"]
    assert "moe_topk_softmax_sorted_topk4_e128" in runs["triton-kernels:routing"]
    assert "gqa_extend_causal_h32_kv4_qk128_vo128" in runs["triton:_fwd_kernel"]
    assert "silu_and_mul_i1024" in runs["jit:run_activation"]
    assert "sgl-kernel:flash_attn_with_kvcache" in every and "sgl-kernel:flash_attn_with_kvcache" not in runs


def test_a_reference_says_what_a_kernel_computes():
    dataset = list(definitions())
    found = functions(dataset, covered(dataset))
    assert (
        found["jit:hadamard_transform"] == "Walsh-Hadamard transform of each row, times a scale: output = scale * x H."
    )
    # A router is a step of a whole layer, too; it is the router that describes it.
    assert "expert router" in found["sgl-kernel:moe_fused_gate"]
    assert all(text.partition(" (and ")[0].endswith(".") for text in found.values())


def test_the_command_lists_kernels_definitions_and_evidence():
    result = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels", "--format", "json"])
    assert result.exit_code == 0, result.output
    rows = {row["kernel"]: row for row in json.loads(result.output)}
    assert len(rows) == len(load_needs(find_root(), "deepseek-v3")["deepseek-v3"]["kernels"])
    norm = rows["sgl-kernel:rmsnorm"]
    assert norm["definitions"][: norm["of_model"]]
    assert "rmsnorm_h7168" in norm["definitions"][: norm["of_model"]]
    assert rows["flashinfer:mm_fp4"]["reason"] == NOT_YET
    text = CliRunner().invoke(main, ["coverage", "--model", "deepseek-v3", "--kernels"]).output
    assert text.splitlines()[0].split()[:2] == ["Kernel", "Definitions"]
    assert text.rstrip().endswith("with evidence from the kernel")
    refused = CliRunner().invoke(main, ["coverage", "--kernels"])
    assert refused.exit_code == 2
    assert "--model NAME" in refused.output


def test_the_command_agrees_with_the_pages_of_kernels():
    """Of the same release, and only with Definitions for which a kernel ran."""
    runs = covered(definitions())
    for needed in load_needs(find_root()).values():
        assert needed["kernel_sources"]["sglang"] == "0.5.11"
        for one in kernel_coverages(find_root(), needed):
            assert sorted(one.definitions) == list(runs.get(one.kernel.partition(".")[0], ())), one.kernel
    result = CliRunner().invoke(main, ["coverage", "--model", "llama-3.1-8b", "--kernels"])
    lines = {line.split()[0]: line for line in result.output.splitlines() if line}
    assert "it did not run for the" in lines["sgl-kernel:flash_attn_with_kvcache"]
    for kernel in (
        "jit:run_rope",
        "flashinfer:top_k_top_p_sampling_from_probs",
        "flashinfer:min_p_sampling_from_probs",
    ):
        assert lines[kernel].split()[1] != "0"
    assert "the kernels of llama-3.1-8b in sglang 0.5.11, " in result.output


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": [{"ops": []}]},
        {"kernels": [{"kernel": "x", "ops": 5}]},
        {"kernels": [{"kernel": 5, "ops": []}]},
        {"kernels": 5},
        {"kernel_sources": []},
        {"kernel_sources": {"sglang": 5}},
        {"model": ["x"]},
    ],
    ids=str,
)
def test_malformed_needs_are_refused(change):
    needed = load_needs(find_root(), "deepseek-v3")["deepseek-v3"] | change
    with pytest.raises(DatasetError, match="models/needs/ is malformed"):
        kernel_coverages(find_root(), needed)


def test_the_document_gives_the_reasons():
    text = (find_root() / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert without_definition(LISTED) in text
