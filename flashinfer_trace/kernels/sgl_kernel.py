"""Kernels of sgl-kernel, which PyPI calls sglang-kernel since version 0.4.0.

DeepGEMM and triton_kernels, which its wheel bundles, are in `flashinfer_trace.kernels.others`."""

from __future__ import annotations

from flashinfer_trace.kernels.needs import (
    at_most,
    cutlass_pages,
    exactly,
    fused_gate,
    kimi_gate,
    multiples,
    one_of,
    reduced_columns,
    row_bytes,
    single_keys,
    tie_order,
    unrepeated_expert,
    vocabulary,
)
from flashinfer_trace.kernels.table import (
    ADA,
    AMPERE,
    B200,
    FROM_BLACKWELL,
    FROM_HOPPER,
    HOPPER,
    Entry,
    Place,
    kernel,
    use,
)

#: The other kernels of a pipeline of experts, after the one that chooses them.
_BETWEEN = "prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum"

#: The ops that the two names of the group quantizer call.
_GROUP_QUANT = (
    "torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2",
    "torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit",
)
#: Families that FlashAttention 3 computes.
FA3_RAGGED = (
    *(f"gqa_ragged_prefill_causal{name}" for name in ("", "_softcap", "_softcap_window", "_window")),
    "mla_ragged_prefill_causal",
)
FA3_DECODE, FA3_PREFILL = (
    tuple(
        f"gqa_paged_{stage}{name}"
        for name in ("", "_ps1", "_sinks", "_sinks_window", "_softcap", "_softcap_window", "_window")
    )
    for stage in ("decode", "prefill_causal")
)
FA3_EXTEND = tuple(
    f"gqa_extend_causal{name}" for name in ("", "_sinks", "_sinks_window", "_softcap", "_softcap_window", "_window")
)
FA3_LATENT = tuple(f"mla_paged_{stage}{pages}" for stage in ("decode", "prefill_causal") for pages in ("", "_ps1"))

KERNELS: tuple[Entry, ...] = (
    kernel("sgl_kernel.apply_shuffle_mul_sum", use("moe_apply_shuffle_mul_sum")),
    kernel(
        "sgl_kernel.concat_mla_absorb_q", use("concat_mla_absorb_q", needs=exactly(head_dim_ckv=512, head_dim_kpe=64))
    ),
    kernel(
        "sgl_kernel.concat_mla_k", use("concat_mla_k", needs=exactly(num_heads=128, head_dim_nope=128, head_dim_kpe=64))
    ),
    kernel(
        "sgl_kernel.cutlass_mla_decode",
        use("mla_paged_decode_page_table", on=B200, needs=(exactly(head_dim_ckv=512, head_dim_kpe=64), cutlass_pages)),
        dropped=True,
    ),
    kernel(
        "sgl_kernel.cutlass_scaled_fp4_mm",
        use("cutlass_scaled_fp4_mm", on=FROM_BLACKWELL, needs=multiples(n=32, k=32)),
        tags=(),
        places=(Place("sgl_kernel.cutlass_scaled_fp4_mm", "sgl-kernel"),),
    ),
    kernel("sgl_kernel.cutlass_w4a8_moe_mm", use("moe_w4a8_grouped_gemm", on=HOPPER)),
    kernel(
        "sgl_kernel.dsv3_router_gemm",
        use("gemm_bf16", on=FROM_HOPPER, needs=(exactly(k=7168), one_of("n", 256, 384))),
        use("gemm_float32_out", variant="float32", on=FROM_HOPPER, needs=(exactly(k=7168), one_of("n", 256, 384))),
        dropped=True,
    ),
    kernel("sgl_kernel.es_fp8_blockwise_scaled_grouped_mm", use("moe_fp8_block_scale_grouped_gemm", on=HOPPER)),
    kernel("sgl_kernel.fast_topk", use("fast_topk")),
    kernel(
        "sgl_kernel.fast_topk_transform_fused",
        use("fast_topk_transform_fused", on=FROM_HOPPER, needs=exactly(top_k=2048)),
        use("fast_topk_transform_fused", variant="decode", on=FROM_HOPPER, needs=exactly(top_k=2048)),
    ),
    kernel(
        "sgl_kernel.fast_topk_transform_ragged_fused",
        use("fast_topk_transform_ragged_fused", on=FROM_HOPPER, needs=exactly(top_k=2048)),
    ),
    kernel(
        "sgl_kernel.fast_topk_v2",
        use("fast_topk_v2", on=FROM_HOPPER, needs=exactly(top_k=2048)),
        launches=("torch.ops.sgl_kernel.fast_topk",),
    ),
    kernel("sgl_kernel.flash_attn.flash_attn_varlen_func", use(*FA3_RAGGED, on=HOPPER)),
    kernel(
        "sgl_kernel.flash_attn.flash_attn_with_kvcache",
        use(*FA3_DECODE, "gqa_paged_decode_fp8_cache", on=HOPPER),
        use(*FA3_PREFILL, on=HOPPER, needs=single_keys),
        use(*FA3_EXTEND, on=HOPPER, needs=at_most(qk_dim=256)),
        use(*FA3_LATENT, on=HOPPER, needs=exactly(head_dim_ckv=512, head_dim_kpe=64)),
    ),
    kernel(
        "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
        use(
            "moe_fp8_block_scale_ds_routing",
            variant=f"pipeline: moe_fused_gate, {_BETWEEN}",
            on=HOPPER,
            needs=fused_gate,
            tags=(
                "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
                "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
            ),
        ),
        use(
            "moe_fp8_block_scale_ds_routing",
            variant=f"pipeline: kimi_k2_moe_fused_gate, {_BETWEEN}",
            on=HOPPER,
            needs=kimi_gate,
            tags=(
                "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
                "sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate.kimi_k2_moe_fused_gate",
            ),
        ),
        use("moe_fp8_block_scale_grouped_gemm", on=HOPPER),
        use(
            "moe_fp8_block_scale_softmax_routing",
            variant=f"pipeline: topk_softmax, {_BETWEEN}",
            on=HOPPER,
            needs=tie_order,
            tags=(
                "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
                "sgl_kernel.topk_softmax",
            ),
        ),
    ),
    kernel(
        "sgl_kernel.fp8_blockwise_scaled_mm",
        use("fp8_blockwise_scaled_mm", on=FROM_HOPPER, needs=multiples(n=128)),
        dropped=True,
    ),
    kernel("sgl_kernel.fp8_scaled_mm", use("fp8_scaled_mm", on=FROM_HOPPER, needs=multiples(k=16, n=8))),
    kernel(
        "torch.ops.sgl_kernel.fused_add_rmsnorm",
        use(
            "fused_add_rmsnorm",
            "fused_add_rmsnorm_eps1e5",
            "fused_add_rmsnorm_residual_out",
            "fused_add_rmsnorm_residual_out_eps1e5",
        ),
    ),
    kernel("torch.ops.sgl_kernel.gelu_and_mul", use("gelu_and_mul", needs=multiples(intermediate_size=8))),
    kernel("torch.ops.sgl_kernel.gelu_tanh_and_mul", use("gelu_tanh_and_mul", needs=multiples(intermediate_size=8))),
    kernel("torch.ops.sgl_kernel.gemma_fused_add_rmsnorm", use("gemma_fused_add_rmsnorm")),
    kernel("torch.ops.sgl_kernel.gemma_rmsnorm", use("gemma_rmsnorm")),
    kernel("sgl_kernel.get_cutlass_w4a8_moe_mm_data", use("moe_w4a8_problem_sizes", on=FROM_HOPPER)),
    kernel("sgl_kernel.int8_scaled_mm", use("int8_scaled_mm", needs=multiples(k=16, n=8))),
    kernel("sgl_kernel.merge_state_v2", use("merge_state_base_e", on=AMPERE, needs=multiples(head_dim=8))),
    kernel("sgl_kernel.moe_align_block_size", use("moe_align_block_size")),
    kernel(
        "sgl_kernel.moe_fused_gate",
        use("moe_topk_deepseek", "moe_topk_deepseek_shared_experts", needs=fused_gate),
        dropped=True,
    ),
    kernel("sgl_kernel.moe_sum_reduce", use("moe_sum_reduce", needs=reduced_columns)),
    kernel("sgl_kernel.prepare_moe_input", use("moe_prepare_input", on=FROM_HOPPER)),
    kernel(
        "sgl_kernel.qserve_w4a8_per_chn_gemm",
        use("qserve_w4a8_per_chn_gemm", on=AMPERE, needs=multiples(n=64, k=128)),
        dropped=True,
    ),
    kernel(
        "sgl_kernel.qserve_w4a8_per_group_gemm",
        use("qserve_w4a8_per_group_gemm", on=AMPERE, needs=multiples(n=64, k=128)),
        dropped=True,
    ),
    kernel("torch.ops.sgl_kernel.rmsnorm", use("rmsnorm", "rmsnorm_eps1e5")),
    kernel(
        "torch.ops.sgl_kernel.rotary_embedding",
        use(
            "rope_with_cos_sin_cache_gptj_style",
            "rope_with_cos_sin_cache_neox_style",
            "rope_with_cos_sin_cache_neox_style_any_heads",
        ),
    ),
    kernel(
        "sgl_kernel.sgl_per_token_group_quant_8bit",
        use("per_token_group_quant_fp8", variant="column-major scales"),
        use("per_token_group_quant_fp8_ue8m0", variant="ue8m0", on=ADA),
        use("per_token_group_quant_int8"),
        launches=("torch.ops.sgl_kernel.sgl_per_token_group_quant_8bit_v2",),
    ),
    kernel(
        "sgl_kernel.sgl_per_token_group_quant_fp8",
        use("per_token_group_quant_fp8"),
        use("per_token_group_quant_fp8", variant="v1"),
        launches=_GROUP_QUANT,
    ),
    kernel(
        "sgl_kernel.sgl_per_token_group_quant_int8",
        use("per_token_group_quant_int8"),
        use("per_token_group_quant_int8", variant="v1"),
        launches=_GROUP_QUANT,
    ),
    kernel("sgl_kernel.sgl_per_token_quant_fp8", use("per_token_quant_fp8", on=ADA)),
    kernel(
        "sgl_kernel.shuffle_rows",
        use("moe_shuffle_rows", "moe_shuffle_rows_fp32", "moe_shuffle_rows_fp8", needs=row_bytes),
    ),
    kernel("torch.ops.sgl_kernel.silu_and_mul", use("silu_and_mul", needs=multiples(intermediate_size=8))),
    kernel(
        "torch.ops.sgl_kernel.top_k_renorm_probs",
        use("top_k_renorm_probs", needs=vocabulary()),
        launches=("sgl_kernel.top_k_renorm_prob",),
        tags=("sgl_kernel.top_k_renorm_prob",),
    ),
    kernel(
        "torch.ops.sgl_kernel.top_p_renorm_probs",
        use("top_p_renorm_probs", needs=vocabulary()),
        launches=("sgl_kernel.top_p_renorm_prob",),
        tags=("sgl_kernel.top_p_renorm_prob",),
    ),
    kernel("sgl_kernel.topk_sigmoid", use("moe_topk_sigmoid", needs=unrepeated_expert)),
    kernel("sgl_kernel.topk_softmax", use("moe_topk_softmax", needs=tie_order)),
)
