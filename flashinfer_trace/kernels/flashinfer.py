"""Kernels of FlashInfer."""

from __future__ import annotations

from flashinfer_trace.kernels.needs import (
    LARGEST_HISTOGRAM,
    at_most,
    compiled_group,
    exactly,
    fused_topk,
    heads_of_a_group,
    merge_threads,
    multiples,
    one_of,
    vocabulary,
)
from flashinfer_trace.kernels.table import ADA, AMPERE, BLACKWELL, FROM_HOPPER, HOPPER, Entry, kernel, use

#: The kernels behind flashinfer's attention wrappers, as they call them.
BACKENDS = {"fa2": AMPERE, "fa3": HOPPER}

KERNELS: tuple[Entry, ...] = (
    kernel("flashinfer.activation.gelu_and_mul", use("gelu_and_mul", needs=multiples(intermediate_size=8))),
    kernel("flashinfer.activation.gelu_tanh_and_mul", use("gelu_tanh_and_mul", needs=multiples(intermediate_size=8))),
    kernel("flashinfer.activation.silu_and_mul", use("silu_and_mul", needs=multiples(intermediate_size=8))),
    kernel(
        "flashinfer.attention.BatchAttentionWithAttentionSinkWrapper",
        use(
            "gqa_paged_decode_sinks",
            "gqa_paged_decode_sinks_window",
            "gqa_paged_prefill_causal_sinks",
            "gqa_paged_prefill_causal_sinks_window",
            variants=BACKENDS,
            needs=exactly(head_dim=64),
        ),
    ),
    kernel("flashinfer.cascade.merge_state", use("merge_state", on=AMPERE, needs=merge_threads)),
    kernel(
        "flashinfer.concat_ops.concat_mla_k",
        use("concat_mla_k", needs=exactly(num_heads=128, head_dim_nope=128, head_dim_kpe=64)),
    ),
    kernel(
        "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper",
        use(
            "gqa_paged_decode",
            "gqa_paged_decode_ps1",
            variant="CUDA cores",
            on=AMPERE,
            needs=(exactly(head_dim=128), compiled_group),
        ),
        use("gqa_paged_decode", "gqa_paged_decode_ps1", variants=BACKENDS, needs=exactly(head_dim=128)),
        use(
            "gqa_paged_decode_softcap",
            "gqa_paged_decode_softcap_window",
            "gqa_paged_decode_window",
            variant="CUDA cores",
            on=AMPERE,
            needs=(one_of("head_dim", 64, 128, 256), compiled_group),
        ),
        use(
            "gqa_paged_decode_softcap",
            "gqa_paged_decode_softcap_window",
            "gqa_paged_decode_window",
            variants=BACKENDS,
            needs=one_of("head_dim", 64, 128, 256),
        ),
    ),
    kernel(
        "flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla",
        use(
            "mla_paged_decode",
            "mla_paged_decode_page_table",
            on=BLACKWELL,
            needs=(exactly(head_dim_ckv=512, head_dim_kpe=64), one_of("page_size", 32, 64)),
        ),
    ),
    kernel("flashinfer.fused_moe.fused_topk_deepseek", use("moe_topk_deepseek", on=ADA, needs=fused_topk)),
    kernel("flashinfer.fused_moe.trtllm_bf16_moe", use("moe_bf16_ds_routing", on=BLACKWELL)),
    kernel("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", use("moe_nvfp4_ds_routing", on=BLACKWELL)),
    kernel(
        "flashinfer.fused_moe.trtllm_fp8_block_scale_moe",
        use("moe_fp8_block_scale_ds_routing", "moe_fp8_block_scale_softmax_routing", on=BLACKWELL),
    ),
    kernel(
        "flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose",
        use("gdn_decode", "gdn_packed_decode", on=FROM_HOPPER, needs=exactly(head_size=128)),
    ),
    kernel(
        "flashinfer.gdn_decode.gated_delta_rule_mtp",
        use("gdn_verify", on=FROM_HOPPER, needs=exactly(head_size=128)),
    ),
    kernel(
        "flashinfer.gdn_prefill.chunk_gated_delta_rule",
        use("gdn_prefill", on=FROM_HOPPER, needs=exactly(head_size=128)),
    ),
    kernel(
        "flashinfer.gemm.tinygemm_bf16",
        # With more, it fills a stage of its pipeline a second time, and gave wrong sums: see the findings.
        use("gemm_bf16_bias", on=FROM_HOPPER, needs=(multiples(n=16, k=64), at_most(k=4096))),
    ),
    kernel(
        "flashinfer.mamba.selective_state_update",
        use(
            "mamba_ssu_decode",
            "mamba_ssu_decode_float32",
            on=AMPERE,
            needs=(exactly(head_dim=64, dstate=128), heads_of_a_group),
        ),
    ),
    kernel("flashinfer.mhc.mhc_post", use("mhc_post", on=AMPERE, needs=multiples(hidden_size=8))),
    kernel("flashinfer.mhc.mhc_pre_big_fuse", use("mhc_pre_big_fuse", on=AMPERE, needs=multiples(hidden_size=8))),
    kernel(
        "flashinfer.mla.BatchMLAPagedAttentionWrapper",
        use(
            "mla_paged_decode",
            "mla_paged_decode_page_table",
            "mla_paged_decode_ps1",
            "mla_paged_prefill_causal",
            "mla_paged_prefill_causal_ps1",
            variants=BACKENDS,
            needs=exactly(head_dim_ckv=512, head_dim_kpe=64),
        ),
    ),
    kernel(
        "flashinfer.norm.fused_add_rmsnorm",
        use(
            "fused_add_rmsnorm",
            "fused_add_rmsnorm_eps1e5",
            "fused_add_rmsnorm_residual_out",
            "fused_add_rmsnorm_residual_out_eps1e5",
        ),
    ),
    kernel("flashinfer.norm.fused_add_rmsnorm_quant", use("fused_add_rmsnorm_quant", on=ADA)),
    kernel("flashinfer.norm.gemma_fused_add_rmsnorm", use("gemma_fused_add_rmsnorm")),
    kernel("flashinfer.norm.gemma_rmsnorm", use("gemma_rmsnorm")),
    kernel("flashinfer.norm.layernorm", use("layernorm", "layernorm_eps1e5")),
    kernel("flashinfer.norm.rmsnorm", use("rmsnorm", "rmsnorm_eps1e5")),
    kernel("flashinfer.norm.rmsnorm_quant", use("rmsnorm_quant", on=ADA)),
    kernel(
        "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper",
        use("gqa_paged_prefill_causal", "gqa_paged_prefill_causal_ps1", variants=BACKENDS, needs=exactly(head_dim=128)),
        use(
            "gqa_paged_prefill_causal_softcap",
            "gqa_paged_prefill_causal_softcap_window",
            "gqa_paged_prefill_causal_window",
            variants=BACKENDS,
            needs=one_of("head_dim", 64, 128, 256),
        ),
    ),
    kernel(
        "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper",
        use(
            "gqa_ragged_prefill_causal",
            "gqa_ragged_prefill_causal_softcap",
            "gqa_ragged_prefill_causal_softcap_window",
            "gqa_ragged_prefill_causal_window",
            variants=BACKENDS,
            needs=one_of("head_dim", 128, 256),
        ),
        use("mla_ragged_prefill_causal", variants=BACKENDS, needs=exactly(qk_dim=192, vo_dim=128)),
    ),
    kernel(
        "flashinfer.prefill.trtllm_ragged_attention_deepseek",
        use("mla_ragged_prefill_causal", on=BLACKWELL, needs=exactly(qk_dim=192, vo_dim=128)),
    ),
    kernel(
        "flashinfer.rope.apply_rope_with_cos_sin_cache",
        use(
            "rope_with_cos_sin_cache_gptj_style",
            "rope_with_cos_sin_cache_neox_style",
            "rope_with_cos_sin_cache_neox_style_any_heads",
            needs=one_of("head_size", 64, 128, 256),
        ),
    ),
    kernel(
        "flashinfer.rope.apply_rope_with_cos_sin_cache_inplace",
        use(
            "rope_with_cos_sin_cache_gptj_style",
            "rope_with_cos_sin_cache_neox_style",
            "rope_with_cos_sin_cache_neox_style_any_heads",
            needs=one_of("head_size", 64, 128, 256),
        ),
    ),
    kernel("flashinfer.rope.mla_rope_quantize_fp8", use("mla_rope_quantize_fp8", on=ADA)),
    kernel("flashinfer.sampling.min_p_sampling_from_probs", use("min_p_sampling_from_probs", needs=vocabulary())),
    kernel("flashinfer.sampling.softmax", use("softmax_temperature", needs=vocabulary())),
    kernel("flashinfer.sampling.top_k_renorm_probs", use("top_k_renorm_probs", needs=vocabulary())),
    kernel("flashinfer.sampling.top_k_sampling_from_probs", use("top_k_sampling_from_probs", needs=vocabulary())),
    kernel(
        "flashinfer.sampling.top_k_top_p_sampling_from_probs",
        use("top_k_top_p_joint_sampling_from_probs", variant="joint", needs=vocabulary()),
        use("top_k_top_p_sampling_from_probs", needs=vocabulary()),
    ),
    kernel(
        "flashinfer.sampling.top_p_renorm_probs",
        use("top_p_renorm_probs", needs=vocabulary(LARGEST_HISTOGRAM)),
        use("top_p_renorm_probs", variant="is_deterministic", needs=vocabulary()),
    ),
    kernel("flashinfer.sampling.top_p_sampling_from_probs", use("top_p_sampling_from_probs", needs=vocabulary())),
)
