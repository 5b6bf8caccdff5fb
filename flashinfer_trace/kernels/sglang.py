"""SGLang's own kernels: Triton, just-in-time CUDA, and what it computes step by step in PyTorch."""

from __future__ import annotations

from flashinfer_trace.kernels.needs import (
    exactly,
    expert_groups,
    filters,
    grouped_heads,
    multiples,
    one_of,
    powers_of_two,
    recorded_vocabulary,
    sorted_choices,
    tie_order,
)
from flashinfer_trace.kernels.table import (
    ADA,
    AMPERE,
    BLACKWELL,
    FROM_BLACKWELL,
    FROM_HOPPER,
    HOPPER,
    TO_HOPPER,
    Entry,
    kernel,
    use,
)

KERNELS: tuple[Entry, ...] = (
    kernel(
        "sglang.jit_kernel.grouped_topk.grouped_topk",
        use("moe_topk_deepseek", on=AMPERE, needs=expert_groups),
        dropped=True,
    ),
    kernel("sglang.jit_kernel.nvfp4.cutlass_fp4_group_mm", use("moe_nvfp4_grouped_gemm", on=BLACKWELL), dropped=True),
    kernel(
        "sglang.jit_kernel.nvfp4.cutlass_scaled_fp4_mm",
        use("cutlass_scaled_fp4_mm", on=FROM_BLACKWELL, needs=multiples(n=32, k=32)),
        dropped=True,
    ),
    kernel(
        "sglang.jit_kernel.nvfp4.scaled_fp4_experts_quant", use("moe_nvfp4_experts_quant", on=BLACKWELL), dropped=True
    ),
    kernel(
        "sglang.jit_kernel.per_token_group_quant_8bit.per_token_group_quant_8bit",
        use("per_token_group_quant_fp8", on=ADA),
        dropped=True,
    ),
    kernel(
        "sglang.kernels.ops.activation.activation.gelu_and_mul",
        use("gelu_and_mul", on=TO_HOPPER, needs=multiples(intermediate_size=8)),
        launches=("sglang.jit_kernel.activation.run_activation",),
        was="sglang.jit_kernel.activation.gelu_and_mul",
    ),
    kernel(
        "sglang.kernels.ops.activation.activation.gelu_tanh_and_mul",
        use("gelu_tanh_and_mul", on=TO_HOPPER, needs=multiples(intermediate_size=8)),
        launches=("sglang.jit_kernel.activation.run_activation",),
        was="sglang.jit_kernel.activation.gelu_tanh_and_mul",
    ),
    kernel(
        "sglang.kernels.ops.activation.activation.relu2",
        use("relu2", on=TO_HOPPER, needs=multiples(intermediate_size=8)),
    ),
    kernel(
        "sglang.kernels.ops.activation.activation.silu_and_mul",
        use("silu_and_mul", on=TO_HOPPER, needs=multiples(intermediate_size=8)),
        launches=("sglang.jit_kernel.activation.run_activation",),
        was="sglang.jit_kernel.activation.silu_and_mul",
    ),
    kernel(
        "sglang.kernels.ops.activation.kimi_k3_situ_and_mul.situ_and_mul",
        use("situ_and_mul", on=TO_HOPPER, needs=multiples(intermediate_size=16)),
    ),
    kernel("sglang.kernels.ops.activation.minimax_m3_swiglu.swiglu_oai_split", use("swiglu_oai", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.activation.silu_and_mul_clamp.silu_and_mul_clamp",
        use("silu_and_mul_clamp", on=AMPERE, needs=multiples(intermediate_size=16)),
    ),
    kernel(
        "sglang.kernels.ops.attention.clamp_position.clamp_position_cuda",
        use("clamp_position", on=AMPERE),
        launches=("sglang.kernels.ops.attention.clamp_position.clamp_position",),
        was="sglang.jit_kernel.clamp_position.clamp_position_cuda",
    ),
    kernel(
        "sglang.kernels.ops.attention.concat_mla.concat_mla_absorb_q",
        use("concat_mla_absorb_q", needs=exactly(head_dim_ckv=512, head_dim_kpe=64)),
        was="sglang.jit_kernel.concat_mla.concat_mla_absorb_q",
    ),
    kernel(
        "sglang.kernels.ops.attention.concat_mla.concat_mla_k",
        use("concat_mla_k", needs=exactly(num_heads=128, head_dim_nope=128, head_dim_kpe=64)),
        was="sglang.jit_kernel.concat_mla.concat_mla_k",
    ),
    kernel(
        "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd",
        use("gqa_paged_decode_fp8_cache", on=ADA, needs=grouped_heads),
        use(
            "gqa_paged_decode_ps1",
            "gqa_paged_decode_sinks",
            "gqa_paged_decode_softcap",
            "mla_paged_decode_ps1",
            on=AMPERE,
            needs=grouped_heads,
        ),
        launches=(
            "sglang.srt.layers.attention.triton_ops.decode_attention._fwd_kernel_stage1",
            "sglang.srt.layers.attention.triton_ops.decode_attention._fwd_grouped_kernel_stage1",
            "sglang.srt.layers.attention.triton_ops.decode_attention._fwd_kernel_stage2",
        ),
        was="sglang.srt.layers.attention.triton_ops.decode_attention.decode_attention_fwd",
    ),
    kernel(
        "sglang.kernels.ops.attention.dsa.dequant_k_cache.dequantize_k_cache_paged_dsa",
        use("dequantize_k_cache", on=ADA, needs=exactly(head_dim_ckv=512, head_dim_kpe=64, group_size=128)),
        launches=("sglang.srt.layers.attention.nsa.dequant_k_cache._dequantize_k_cache_paged_kernel",),
        was="sglang.srt.layers.attention.nsa.dequant_k_cache.dequantize_k_cache_paged",
    ),
    kernel(
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_paged_v2",
        use("fast_topk_transform_fused", on=FROM_HOPPER, needs=exactly(top_k=2048)),
    ),
    kernel(
        "sglang.kernels.ops.attention.dsv4.topk.topk_transform_ragged_v2",
        use("fast_topk_transform_ragged_fused", on=FROM_HOPPER, needs=exactly(top_k=2048)),
    ),
    kernel(
        "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd",
        use(
            "gqa_extend_causal",
            "gqa_extend_causal_sinks",
            "gqa_extend_causal_sinks_window",
            "gqa_extend_causal_softcap",
            "gqa_extend_causal_softcap_window",
            "gqa_extend_causal_window",
            on=AMPERE,
        ),
        launches=("sglang.srt.layers.attention.triton_ops.extend_attention._fwd_kernel",),
        was="sglang.srt.layers.attention.triton_ops.extend_attention.extend_attention_fwd",
    ),
    kernel("sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule", use("gdn_prefill", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated",
        use("rmsnorm_sigmoid_gate", "rmsnorm_silu_gate", on=AMPERE),
        launches=("sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",),
    ),
    kernel(
        "sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        use("gdn_packed_decode", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.attention.fla.fused_recurrent.fused_recurrent_kda_packed_decode",
        use("kda_packed_decode", on=AMPERE),
    ),
    kernel("sglang.kernels.ops.attention.fla.kda.chunk_kda", use("kda_prefill", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.attention.fla.l2norm.l2norm_fwd",
        use("l2norm", on=AMPERE),
        launches=(
            "sglang.kernels.ops.attention.fla.l2norm.gdn_prefill_qkv_prepare_fwd",
            "sglang.kernels.ops.attention.fla.l2norm.l2norm_fwd_kernel",
        ),
    ),
    kernel(
        "sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated",
        use("rmsnorm_sigmoid_gate", "rmsnorm_silu_gate", "silu_gate_grouped_rmsnorm", on=AMPERE),
        launches=("sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",),
    ),
    kernel(
        "sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate.fused_qk_gemma_rmsnorm_rope_gate",
        use("qk_gemma_rmsnorm_rope_gate", on=AMPERE),
        use("qk_gemma_rmsnorm_rope", variant="without gate", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.attention.kv_indices.create_flashinfer_kv_indices_triton",
        use("create_flashinfer_kv_indices", variants={"": AMPERE, "blocks of tokens in parallel": AMPERE}),
    ),
    kernel(
        "sglang.kernels.ops.attention.kv_indices.create_flashmla_kv_indices_triton",
        use("create_flashmla_kv_indices", on=AMPERE, needs=powers_of_two("page_size")),
    ),
    kernel(
        "sglang.kernels.ops.attention.linear.fused_gdn_gating.fused_gdn_gating",
        use("fused_gdn_gating", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update",
        use("gdn_decode", "gdn_packed_decode", "gdn_verify", "kda_packed_decode", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.attention.minimax_qknorm_rope.minimax_qknorm_rope",
        use("qk_gemma_rmsnorm_rope", on=AMPERE, needs=exactly(head_size=128, rotary_dim=64)),
    ),
    kernel(
        "sglang.kernels.ops.attention.mla_qk_prep.concat_and_cast_mha_k_triton",
        use("concat_mla_k", needs=powers_of_two("num_heads", "head_dim_nope", "head_dim_kpe")),
        launches=("sglang.srt.layers.attention.utils.concat_and_cast_mha_k_kernel",),
        was="sglang.srt.layers.attention.utils.concat_and_cast_mha_k_triton",
    ),
    kernel(
        "sglang.kernels.ops.attention.position.compute_position_kernel",
        use("compute_position", on=AMPERE),
        launches=("sglang.kernels.ops.attention.position.compute_position_triton",),
    ),
    kernel(
        "sglang.kernels.ops.attention.rope.apply_rope_inplace_with_kvcache",
        use("rope_with_cos_sin_cache_neox_style_store", on=AMPERE, needs=one_of("head_size", 64, 128, 256)),
        launches=("sglang.jit_kernel.rope.run_rope_store",),
        was="sglang.jit_kernel.rope.apply_rope_inplace_with_kvcache",
    ),
    kernel(
        "sglang.kernels.ops.attention.rope.apply_rope_with_cos_sin_cache_inplace",
        use(
            "rope_with_cos_sin_cache_gptj_style",
            "rope_with_cos_sin_cache_neox_style",
            "rope_with_cos_sin_cache_neox_style_any_heads",
            on=AMPERE,
            needs=one_of("rotary_dim", 64, 128, 256),
        ),
        launches=("sglang.jit_kernel.rope.run_rope",),
        was="sglang.jit_kernel.rope.apply_rope_with_cos_sin_cache_inplace",
    ),
    kernel(
        "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkv_split_gdn_prefill",
        use("fused_qkv_split_gdn_prefill", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
        use("fused_qkvzba_split_reshape_cat", on=AMPERE, needs=powers_of_two("head_size")),
    ),
    kernel(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", use("gate_sigmoid_mul_add", on=AMPERE)
    ),
    kernel("sglang.kernels.ops.elementwise.elementwise.fused_sigmoid_mul", use("sigmoid_mul", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.gemm.bmm_fp8", use("bmm_fp8", on=ADA, needs=multiples(n=16, k=16)), was="sgl_kernel.bmm_fp8"
    ),
    kernel(
        "sglang.kernels.ops.gemm.dsv3_fused_a_gemm.dsv3_fused_a_gemm",
        use("gemm_bf16", on=FROM_HOPPER, needs=exactly(n=2112, k=7168)),
        was="sgl_kernel.dsv3_fused_a_gemm",
    ),
    kernel(
        "sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton",
        use("fp8_blockwise_scaled_mm", on=ADA),
        launches=("sglang.srt.layers.quantization.fp8_kernel._w8a8_block_fp8_matmul",),
        was="sglang.srt.layers.quantization.fp8_kernel.w8a8_block_fp8_matmul_triton",
    ),
    kernel(
        "sglang.kernels.ops.gemm.gptq_marlin.gptq_marlin_gemm",
        use("gptq_marlin_gemm", on=AMPERE, needs=multiples(n=64, k=128)),
    ),
    kernel(
        "sglang.kernels.ops.gemm.tiny_gemm.tiny_gemm_bf16",
        use("gemm_float32_out", variant="float32", on=AMPERE, needs=(multiples(k=512), one_of("n", 128, 256, 384))),
    ),
    kernel(
        "sglang.kernels.ops.kvcache.dsa_fused_store_index_cache.fused_store_index_k_cache",
        use("fused_store_index_k_cache", on=ADA, needs=exactly(head_dim=128, page_size=64)),
    ),
    kernel(
        "sglang.kernels.ops.kvcache.kvcache.store_cache",
        use("store_cache", on=AMPERE),
        was="sglang.jit_kernel.kvcache.store_cache",
    ),
    kernel(
        "sglang.kernels.ops.layernorm.gemma4_fused_ops.gemma_dual_rmsnorm_residual_scalar",
        use("dual_rmsnorm_residual_scalar", on=AMPERE),
    ),
    kernel("sglang.kernels.ops.layernorm.gemma4_fused_ops.gemma_qkv_rmsnorm", use("qkv_rmsnorm", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.layernorm.gemma4_fused_ops.gemma_rmsnorm_residual_scalar",
        use("rmsnorm_residual_scalar", on=AMPERE),
    ),
    kernel("sglang.kernels.ops.layernorm.mhc_head.fused_hc_head", use("hc_head", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.layernorm.norm.fused_inplace_qknorm",
        use("fused_qknorm", "fused_qknorm_eps1e5", on=AMPERE, needs=one_of("head_dim", 64, 128, 256, 512, 1024)),
        launches=("sglang.jit_kernel.norm.qknorm",),
        was="sglang.jit_kernel.norm.fused_inplace_qknorm",
    ),
    kernel(
        "sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate.kimi_k2_moe_fused_gate",
        use("moe_topk_deepseek", needs=exactly(num_experts=384, n_group=1)),
        was="sgl_kernel.kimi_k2_moe_fused_gate",
    ),
    kernel(
        "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_fn", use("causal_conv1d", on=AMPERE, needs=filters)
    ),
    kernel(
        "sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update",
        use("causal_conv1d_update", on=AMPERE, needs=filters),
    ),
    kernel(
        "sglang.kernels.ops.mamba.triton_ops.mamba_ssm.selective_state_update",
        use("mamba_ssu_decode", "mamba_ssu_decode_float32", on=AMPERE),
        use("mamba_ssu_decode", "mamba_ssu_decode_float32", variant="one rate a head", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.mamba.triton_ops.ssd_combined.mamba_chunk_scan_combined",
        use("mamba_ssd_prefill", on=AMPERE),
        use("mamba_ssd_prefill", variant="no initial states", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.memory.allocator.alloc_decode_kernel",
        use("alloc_decode", on=AMPERE, needs=powers_of_two("page_size")),
    ),
    kernel(
        "sglang.kernels.ops.memory.allocator.alloc_extend_kernel",
        use("alloc_extend", on=AMPERE, needs=powers_of_two("page_size")),
    ),
    kernel("sglang.kernels.ops.memory.common.get_last_loc_triton", use("get_last_loc", on=AMPERE)),
    kernel("sglang.kernels.ops.memory.common.get_last_loc_triton_safe", use("get_last_loc", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.memory.common.write_req_to_token_pool_triton", use("write_req_to_token_pool", on=AMPERE)
    ),
    kernel("sglang.kernels.ops.moe.dsv4.hash_topk", use("moe_topk_hash", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.moe.ep_moe_kernels.deepep_post_reorder_triton_kernel",
        use("moe_post_reorder", on=AMPERE),
        was="sglang.srt.layers.moe.ep_moe.kernels.deepep_post_reorder_triton_kernel",
    ),
    kernel("sglang.kernels.ops.moe.ep_moe_kernels.post_reorder_deepgemm", use("moe_post_reorder", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.moe.ep_moe_kernels.silu_and_mul_masked_post_quant_fwd",
        use("silu_and_mul_per_token_group_quant_fp8", variant="rows dealt to 8 experts", on=ADA),
        launches=("sglang.srt.layers.moe.ep_moe.kernels._silu_and_mul_post_quant_kernel",),
        was="sglang.srt.layers.moe.ep_moe.kernels.silu_and_mul_masked_post_quant_fwd",
    ),
    kernel(
        "sglang.kernels.ops.moe.fused_moe_triton_kernels.fused_append_shared_experts_with_weights",
        use("moe_append_shared_experts", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.moe.fused_moe_triton_kernels.fused_moe_kernel",
        use("moe_bf16_expert_gemm", on=AMPERE),
        use("moe_fp8_block_scale_expert_gemm", variant="fp8 blocks", on=HOPPER),
        was="sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels.fused_moe_kernel",
    ),
    kernel(
        "sglang.kernels.ops.moe.fused_moe_triton_kernels.moe_sum_reduce_triton",
        use("moe_sum_reduce"),
        was="sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_kernels.moe_sum_reduce_triton",
    ),
    kernel("sglang.kernels.ops.moe.gemma4_routing.gemma4_fused_routing", use("moe_topk_softmax_scaled", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.moe.moe_align_small_numel.moe_align_small_numel", use("moe_align_block_size", on=AMPERE)
    ),
    kernel(
        "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
        use("moe_topk_deepseek", on=AMPERE, needs=sorted_choices),
        use("moe_topk_deepseek_shared_experts", on=AMPERE),
        use("moe_topk_softmax", variant="softmax", on=AMPERE),
        use("moe_topk_sqrtsoftplus", variant="sqrtsoftplus", on=AMPERE),
    ),
    kernel(
        "sglang.kernels.ops.moe.moe_route_radix.route_radix",
        use("moe_topk_deepseek", on=AMPERE, needs=exactly(num_experts=896, top_k=16, n_group=1)),
    ),
    kernel(
        "sglang.kernels.ops.moe.moe_wna16_marlin.moe_wna16_marlin_gemm",
        use("moe_wna16_expert_gemm", on=AMPERE, needs=multiples(n=64, k=128)),
    ),
    kernel(
        "sglang.kernels.ops.quantization.dsa_quant_k_cache.quantize_k_cache",
        use("quantize_k_cache", on=ADA, needs=exactly(head_dim_ckv=512, head_dim_kpe=64, group_size=128)),
        was="sglang.srt.layers.attention.nsa.quant_k_cache.quantize_k_cache",
    ),
    kernel(
        "sglang.kernels.ops.quantization.dsa_quant_k_cache.quantize_k_cache_separate",
        use("quantize_k_cache", on=ADA, needs=exactly(head_dim_ckv=512, head_dim_kpe=64, group_size=128)),
        launches=("sglang.srt.layers.attention.nsa.quant_k_cache._quantize_k_cache_fast_kernel",),
        was="sglang.srt.layers.attention.nsa.quant_k_cache.quantize_k_cache_separate",
    ),
    kernel(
        "sglang.kernels.ops.quantization.hadamard.hadamard_transform",
        use("hadamard_transform"),
        was="sglang.jit_kernel.hadamard.hadamard_transform",
    ),
    kernel(
        "sglang.kernels.ops.quantization.int8_kernel.per_token_group_quant_int8",
        use("per_token_group_quant_int8", on=ADA),
        was="sglang.srt.layers.quantization.int8_kernel.per_token_group_quant_int8",
    ),
    kernel(
        "sglang.kernels.ops.quantization.int8_kernel.per_token_quant_int8",
        use("per_token_quant_int8", on=ADA),
        launches=("sglang.srt.layers.quantization.int8_kernel._per_token_quant_int8",),
        was="sglang.srt.layers.quantization.int8_kernel.per_token_quant_int8",
    ),
    kernel(
        "sglang.kernels.ops.quantization.per_token_group_quant.per_token_group_quant",
        use("per_token_group_quant_fp8", "per_token_group_quant_fp8_ue8m0", "per_token_group_quant_int8", on=ADA),
    ),
    kernel(
        "sglang.kernels.ops.quantization.per_token_quant_fp8.per_token_quant_fp8", use("per_token_quant_fp8", on=ADA)
    ),
    kernel(
        "sglang.kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton",
        use("chain_speculative_sampling", on=AMPERE),
    ),
    # In sglang-kernel 0.4.2 it accepts tokens of probability 0 (findings/kernels.json), which no family describes.
    kernel(
        "sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only",
        use("tree_speculative_sampling_target_only"),
    ),
    kernel("sglang.kernels.ops.speculative.topk1.draft_topk1_postprocess", use("draft_topk1_postprocess", on=AMPERE)),
    kernel(
        "sglang.kernels.ops.speculative.tree.build_tree_kernel_efficient",
        use("build_tree_kernel_efficient"),
        was="sgl_kernel.build_tree_kernel_efficient",
    ),
    kernel(
        "sglang.kernels.ops.speculative.tree.verify_tree_greedy",
        use("verify_tree_greedy"),
        was="sgl_kernel.verify_tree_greedy",
    ),
    kernel(
        "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn",
        use("causal_conv1d", on=AMPERE, needs=filters),
        launches=("sglang.kernels.ops.mamba.causal_conv1d.causal_conv1d_fwd",),
    ),
    kernel(
        "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_update",
        use("causal_conv1d_update", on=AMPERE, needs=filters),
        launches=("sglang.kernels.ops.mamba.causal_conv1d.causal_conv1d_update",),
    ),
    kernel(
        "sglang.srt.layers.layernorm.Gemma3RMSNorm", use("gemma_rmsnorm", variant="forward_native", on=AMPERE), tags=()
    ),
    kernel(
        "sglang.srt.layers.layernorm.RMSNorm",
        use(
            "fused_add_rmsnorm_residual_out",
            "fused_add_rmsnorm_residual_out_eps1e5",
            variant="forward_native in batch-invariant mode",
            on=AMPERE,
        ),
        tags=(),
    ),
    kernel(
        "sglang.srt.layers.moe.ep_moe.kernels.post_reorder_triton_kernel",
        use("moe_post_reorder", on=AMPERE),
        dropped=True,
    ),
    kernel(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts",
        use(
            "moe_bf16_softmax_routing",
            variant="with sgl_kernel: topk_softmax",
            on=HOPPER,
            needs=tie_order,
            tags=(
                "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts",
                "sgl_kernel.topk_softmax",
            ),
        ),
    ),
    kernel(
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.moe_sum_reduce_torch_compile",
        use("moe_sum_reduce", variant="eager", on=AMPERE),
        tags=(),
    ),
    kernel(
        "sglang.srt.layers.moe.topk.biased_grouped_topk_impl",
        use("moe_topk_deepseek_shared_experts", variant="eager", on=AMPERE, needs=exactly(num_fused_shared_experts=1)),
    ),
    kernel(
        "sglang.srt.layers.moe.topk.grouped_topk_gpu", use("moe_topk_softmax", variant="eager, one group", on=AMPERE)
    ),
    kernel(
        "sglang.srt.layers.quantization.fp8_kernel.per_token_group_quant_8bit",
        use("per_token_group_quant_fp8", on=ADA),
        dropped=True,
    ),
    kernel(
        "sglang.srt.layers.rotary_embedding.utils.apply_rotary_pos_emb_native",
        use("rope_with_cos_sin", variant="eager", on=AMPERE),
    ),
    kernel(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        use("top_k_top_p_joint_sampling_from_probs", on=AMPERE, needs=recorded_vocabulary),
        use("top_k_top_p_joint_sampling_from_probs", variant="with seeds", on=AMPERE, needs=recorded_vocabulary),
        tags=(),
    ),
    kernel(
        "sglang.srt.mem_cache.utils.set_mla_kv_buffer_triton",
        use("set_mla_kv_buffer", on=AMPERE),
        launches=(
            "sglang.srt.mem_cache.utils.set_mla_kv_buffer_kernel",
            "sglang.kernels.ops.kvcache.mla_buffer.set_mla_kv_buffer_dcp_sharded_triton",
        ),
    ),
)
