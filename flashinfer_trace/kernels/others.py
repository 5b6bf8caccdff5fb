"""Kernels of PyTorch, DeepGEMM, FlashAttention 4, FlashMLA and triton_kernels."""

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
from flashinfer_trace.kernels.sgl_kernel import FA3_RAGGED
from flashinfer_trace.kernels.table import AMPERE, BLACKWELL, FROM_HOPPER, HOPPER, Entry, kernel, use

#: The other kernels of a pipeline of experts, after the one that chooses them.
_BETWEEN = "prepare_moe_input, shuffle_rows, silu_and_mul, shuffle_mul_sum"

KERNELS: tuple[Entry, ...] = (
    kernel("deep_gemm.bf16_gemm_nn", use("gemm_bf16", on=FROM_HOPPER, needs=sizes_of_one_model), tags=()),
    kernel("deep_gemm.bf16_gemm_nt", use("gemm_float32_out", variant="float32", on=FROM_HOPPER), tags=()),
    kernel(
        "deep_gemm.fp8_gemm_nt",
        use("fp8_blockwise_scaled_mm", on=HOPPER, needs=multiples(n=64)),
        tags=(),
        launches=("deep_gemm.fp8_fp4_gemm_nt",),
    ),
    kernel(
        "deep_gemm.fp8_m_grouped_gemm_nt_masked",
        use("moe_fp8_block_scale_grouped_gemm", on=HOPPER),
        tags=(),
        launches=("deep_gemm.m_grouped_fp8_gemm_nt_masked", "deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked"),
    ),
    kernel(
        "deep_gemm.fp8_mqa_logits", use("fp8_mqa_logits", on=HOPPER, needs=exactly(num_heads=64, head_dim=128)), tags=()
    ),
    kernel(
        "deep_gemm.fp8_paged_mqa_logits",
        use("fp8_mqa_logits", variant="pages of 64", on=HOPPER, needs=exactly(num_heads=64, head_dim=128)),
        tags=(),
    ),
    kernel(
        "deep_gemm.m_grouped_fp8_gemm_nt_contiguous",
        use("moe_fp8_block_scale_grouped_gemm", on=HOPPER),
        tags=(),
        launches=("deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous",),
    ),
    kernel("flash_attn.cute.flash_attn_varlen_func", use(*FA3_RAGGED, on=HOPPER), tags=()),
    kernel(
        "flash_mla.flash_mla_sparse_fwd",
        use("dsa_sparse_attention", on=HOPPER, needs=(exactly(head_dim_ckv=512, head_dim_kpe=64), multiples(topk=128))),
        # On an H200, it says that it is for SM100f alone.
        use("dsa_sparse_attention_sinks", on=BLACKWELL, needs=(exactly(head_dim=512), multiples(topk=128)), tags=()),
        launches=("sglang.kernels.ops.attention.flash_mla_interface.flash_mla_sparse_fwd",),
        was="sgl_kernel.flash_mla.flash_mla_sparse_fwd",
        tags=("sgl_kernel.flash_mla.flash_mla_sparse_fwd",),
    ),
    kernel(
        "flash_mla.flash_mla_with_kvcache",
        use(
            "dsa_sparse_attention_fp8_cache",
            variant="sparse, fp8 cache, with get_mla_metadata",
            on=HOPPER,
            needs=(exactly(head_dim_ckv=512, head_dim_kpe=64, num_groups=4, page_size=64), multiples(topk=128)),
        ),
        use(
            "mla_paged_decode",
            variant="with get_mla_metadata",
            on=HOPPER,
            needs=(exactly(head_dim_ckv=512, head_dim_kpe=64), exactly(page_size=64)),
        ),
        was="sgl_kernel.flash_mla.flash_mla_with_kvcache",
        tags=("sgl_kernel.flash_mla.flash_mla_with_kvcache",),
    ),
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
            tags=("sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",),
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
        "triton_kernels.matmul.matmul",
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
            "matmuldflt_dflt._p_matmul",
            "matmuldflt_dflt._matmul",
            "matmuldflt_swiglu._p_matmul",
            "matmuldflt_swiglu._matmul",
            "matmul_ogs_dflt_dflt._p_matmul_ogs",
            "matmul_ogs_dflt_dflt._matmul_ogs",
            "matmul_ogs_swiglu_dflt._p_matmul_ogs",
            "matmul_ogs_swiglu_dflt._matmul_ogs",
            "matmul_ogs_dflt_dflt._reduce_grouped",
        ),
        was="triton_kernels.matmul_ogs.matmul_ogs",
    ),
    kernel(
        "triton_kernels.topk.topk",
        use("moe_topk_softmax_sorted", on=AMPERE, needs=powers_of_two("top_k")),
        was="triton_kernels.routing.routing",
    ),
)
