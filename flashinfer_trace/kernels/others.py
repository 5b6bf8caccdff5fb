"""Kernels of PyTorch, DeepGEMM and triton_kernels."""

from __future__ import annotations

from flashinfer_trace.kernels.needs import (
    exactly,
    fused_gate,
    multiples,
    powers_of_two,
    sizes_of_one_model,
    tie_order,
    vocabulary,
)
from flashinfer_trace.kernels.table import AMPERE, FROM_HOPPER, HOPPER, Entry, kernel, use

__all__ = ["KERNELS"]

#: The other kernels of a pipeline of experts, after the one that chooses them.
_BETWEEN = "prepare_moe_input, shuffle_rows, silu_and_mul, shuffle_mul_sum"

KERNELS: tuple[Entry, ...] = (
    kernel("deep_gemm.bf16_gemm_nn", use("gemm_bf16", on=FROM_HOPPER, needs=sizes_of_one_model), tags=()),
    kernel("deep_gemm.bf16_gemm_nt", use("gemm_float32_out", variant="float32", on=FROM_HOPPER), tags=()),
    kernel("deep_gemm.fp8_gemm_nt", use("fp8_blockwise_scaled_mm", on=HOPPER, needs=multiples(n=64)), tags=()),
    kernel(
        "deep_gemm.fp8_m_grouped_gemm_nt_masked",
        use("moe_fp8_block_scale_grouped_gemm", on=HOPPER),
        tags=(),
        launches=("deep_gemm.m_grouped_fp8_gemm_nt_masked",),
    ),
    kernel(
        "deep_gemm.fp8_mqa_logits", use("fp8_mqa_logits", on=HOPPER, needs=exactly(num_heads=64, head_dim=128)), tags=()
    ),
    kernel("deep_gemm.m_grouped_fp8_gemm_nt_contiguous", use("moe_fp8_block_scale_grouped_gemm", on=HOPPER), tags=()),
    kernel("torch.bmm", use("bmm_bf16", variant="cuBLAS"), tags=()),
    kernel("torch.matmul", use("gemm", variant="cuBLAS, float32 sums"), use("gemm_bf16", variant="cuBLAS"), tags=()),
    kernel("torch.mm", use("gemm_float32_out", variant="out_dtype=float32"), tags=()),
    kernel(
        "torch.nn.functional.grouped_mm",
        use(
            "moe_bf16_ds_routing",
            variant=f"pipeline with sgl_kernel: moe_fused_gate, {_BETWEEN}",
            on=HOPPER,
            needs=fused_gate,
            tags=("sgl_kernel.moe_fused_gate",),
        ),
        use(
            "moe_bf16_softmax_routing",
            variant=f"pipeline with sgl_kernel: topk_softmax, {_BETWEEN}",
            on=HOPPER,
            needs=tie_order,
            tags=("sgl_kernel.topk_softmax",),
        ),
        tags=(),
    ),
    kernel("torch.nn.functional.linear", use("gemm_bf16_bias", "gemm_float32", variant="cuBLAS"), tags=()),
    kernel("torch.softmax", use("softmax_temperature", needs=vocabulary()), tags=()),
    kernel(
        "triton_kernels.matmul_ogs.matmul_ogs",
        use(
            "moe_bf16_gather_gemm",
            "moe_bf16_gather_gemm_swiglu",
            "moe_bf16_scatter_gemm",
            "moe_bf16_scatter_gemm_bias",
            "moe_mxfp4_gather_gemm_swiglu",
            "moe_mxfp4_scatter_gemm_bias",
            on=FROM_HOPPER,
        ),
        launches=(
            "matmul_ogs_dflt_dflt._p_matmul_ogs",
            "matmul_ogs_dflt_dflt._matmul_ogs",
            "matmul_ogs_swiglu_dflt._p_matmul_ogs",
            "matmul_ogs_swiglu_dflt._matmul_ogs",
            "matmul_ogs_dflt_dflt._reduce_grouped",
        ),
    ),
    kernel("triton_kernels.routing.routing", use("moe_topk_softmax_sorted", on=AMPERE, needs=powers_of_two("top_k"))),
)
