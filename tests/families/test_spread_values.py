"""Kernels that are right where all scales, rows or blocks of a tensor are of one size, unlike those of checkpoints."""

from __future__ import annotations

import pytest
from changed_references import changed, wrong_kernel

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.verify import Job, verify

DEEPSEEK = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
PIPELINE = "moe_fp8_block_scale_softmax_routing_topk10_e128_h2048_i512"
#: Where a reference reads scales of weights, which real checkpoints have down to 1e-8.
SCALES = (
    (DEEPSEEK, "gemm1_weights_scale[expert]"),
    (DEEPSEEK, "gemm2_weights_scale[expert]"),
    (PIPELINE, "gemm1_weights_scale[expert]"),
    (PIPELINE, "gemm2_weights_scale[expert]"),
    ("moe_fp8_block_scale_expert_gemm_topk8_r8_e32_n7168_k2048", "weights_scale[expert]"),
    ("moe_fp8_block_scale_grouped_gemm_e32_n7168_k2048", "b_scale[expert]"),
    ("moe_w4a8_grouped_gemm_e32_n7168_k2048", "b_scale[expert]"),
    ("fp8_blockwise_scaled_mm_n12288_k1536", "row_scales[:, :, None]"),
    ("fp8_scaled_mm_n2112_k7168", "* B_scale)"),
    ("int8_scaled_mm_n6144_k4096", "* B_scale)"),
    ("fp8_mqa_logits_h64_d128", "k_scale[:, None]"),
)
#: Kernels that scale, floor or quantize all rows alike.
ALIKE = {
    "moe_fp8_block_scale_expert_gemm_topk8_r8_e32_n7168_k2048": ("amax(dim=-1, keepdim=True)", "amax()"),
    "per_token_group_quant_fp8_h1024_g128": ("clamp_min(EPS)", "clamp_min(1.0)"),
    "per_token_group_quant_int8_h1536_g128": ("clamp_min(EPS)", "clamp_min(1.0)"),
    "per_token_quant_fp8_h14336": ("amax(dim=1)", "amax(dim=1).clamp_min(1.0)"),
    "per_token_quant_int8_h14336": ("clamp_min(EPS)", "clamp_min(1.0)"),
    "silu_and_mul_per_token_group_quant_fp8_i2048_g128": ("clamp_min(EPS)", "clamp_min(1.0)"),
}
#: The activation between two products in e4m3, with one scale for all tokens of an expert instead of one per group.
ONE_SCALE = (
    "result = swiglu_mlp(x[token], gemm1, gemm2)",
    "y = x[token] @ gemm1.T\n"
    "        up, gate = y.chunk(2, dim=1)\n"
    "        y = torch.nn.functional.silu(gate) * up\n"
    "        scale = y.abs().amax().clamp_min(1e-10) / 448.0\n"
    "        result = (y / scale).to(torch.float8_e4m3fn).float() * scale @ gemm2.T",
)


def rejected(definition, kernel=None):
    """Whether the corners alone reject it."""
    report = verify(Job(definition, family_of(definition), kernel), examples=0)
    return report.status == "failed" and "x its bound" in report.message


@pytest.mark.parametrize(("name", "scales"), SCALES)
def test_scales_of_weights_must_not_be_clamped(name, scales):
    clamped = f"{scales.rstrip(')')}.clamp_min(1e-6)" + ")" * scales.count("* ")
    assert rejected(changed(name, scales, clamped))


@pytest.mark.parametrize(("name", "change"), ALIKE.items())
def test_rows_must_not_be_scaled_alike(name, change):
    assert rejected(changed(name, *change))


def test_a_pipeline_must_not_scale_the_tokens_of_an_expert_alike():
    definition = flashinfer_trace.load(PIPELINE)
    assert rejected(definition, wrong_kernel(definition, *ONE_SCALE))
