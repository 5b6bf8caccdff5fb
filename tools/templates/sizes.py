"""Sizes for recording templates, in addition to those of their `init`: of models, of none, and in other dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

BF16, FP16, FP32, FP8 = "bfloat16", "float16", "float32", "float8_e4m3fn"

#: (template, const axes, dtypes of inputs where the `init` has none or others)
Call = tuple[str, Mapping[str, int], Mapping[str, str]]

_NORM = {"hidden_states": BF16, "residual": BF16, "weight": BF16}
_PAGED = dict.fromkeys(("q", "k_cache", "v_cache"), BF16) | dict.fromkeys(("kv_indptr", "kv_indices"), "int32")
_RAGGED = dict.fromkeys(("q", "k", "v"), BF16) | dict.fromkeys(("qo_indptr", "kv_indptr"), "int32")
_LATENT = dict.fromkeys(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), BF16)
_LATENT |= dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "sparse_indices"), "int32")
_BLOCKS = {"a": FP8, "b": FP8, "input": FP8, "weight": FP8}
_BLOCKS |= dict.fromkeys(("a_scale", "b_scale", "input_scale", "weight_scale"), FP32)
_PROBS = {"probs": FP32, "logits": FP32, "top_k": "int32", "top_p": FP32}
_ROPE = {"query": BF16, "key": BF16, "cos_sin_cache": FP32, "positions": "int64"}
_GQA = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_MLA = {"num_qo_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64}


def sized_calls() -> Iterator[Call]:
    """The calls, template by template."""
    for hidden in (128, 512, 1536, 4096, 6656, 7168):
        yield "rmsnorm", {"hidden_size": hidden}, _NORM
    yield "rmsnorm", {"hidden_size": 4096}, dict.fromkeys(_NORM, FP16)
    for hidden in (2048, 4096):
        yield "fused_add_rmsnorm", {"hidden_size": hidden}, _NORM
    for name in ("gemma_rmsnorm", "gemma_fused_add_rmsnorm"):
        yield name, {"hidden_size": 2304}, _NORM
    yield "layernorm", {"hidden_size": 128}, {"hidden_states": BF16, "weight": FP32, "bias": FP32}
    for name, sizes in (
        ("silu_and_mul", (2048, 3000, 28672)),
        ("gelu_and_mul", (36864,)),
        ("gelu_tanh_and_mul", (20480,)),
    ):
        for hidden in sizes:
            yield name, {"hidden_size": hidden, "hidden_div_2": hidden // 2}, {"input": BF16}
    yield "silu_and_mul", {"hidden_size": 2048}, {"input": FP16}
    for heads in (16, 24):
        states = {"v_a": BF16, "v_b": BF16, "s_a": FP32, "s_b": FP32}
        yield "merge_state", {"num_heads": heads, "head_dim": 128}, states
    for n, k in ((4096, 4096), (7168, 2048), (4000, 4000)):
        yield "gemm_bf16", {"N": n, "K": k}, {"A": BF16, "B": BF16}
    yield "bmm_bf16", {"N": 128, "K": 512}, {"A": BF16, "B": BF16}
    yield "bmm_fp8", {"N": 128, "K": 512, "scalar": 1}, {"A": FP8, "B": FP8, "A_scale": FP32, "B_scale": FP32}
    for name in ("gemm_fp8_nt_groupwise", "fp8_blockscale_gemm_sm90"):
        for n, k in ((7168, 2048), (512, 1024)):
            yield name, {"N": n, "K": k}, _BLOCKS
    for page in (1, 16, 64):
        yield "gqa_paged_decode", {**_GQA, "page_size": page}, _PAGED
        yield "gqa_paged_prefill", {**_GQA, "page_size": page}, {**_PAGED, "qo_indptr": "int32"}
        yield "mla_paged_decode", {**_MLA, "page_size": page}, _LATENT
        yield "mla_paged_prefill", {**_MLA, "page_size": page}, _LATENT
    yield "gqa_paged_decode", {**_GQA, "page_size": 1}, {**_PAGED, "k_cache": FP16, "v_cache": FP16, "q": FP16}
    yield "gqa_ragged", _GQA, _RAGGED
    yield "gqa_ragged", {**_GQA, "num_qo_heads": 24}, _RAGGED
    yield "dsa_sparse_attention", {**_MLA, "page_size": 64, "topk": 2048}, _LATENT
    for vocabulary in (128256, 50000):
        for name in (
            *("softmax", "min_p_sampling", "top_k_sampling", "top_p_sampling"),
            *("top_k_top_p_sampling", "top_k_renorm_probs", "top_p_renorm_probs"),
        ):
            yield name, {"vocab_size": vocabulary}, _PROBS
    wide = {"num_q_heads_x_head_size": 4096, "num_k_heads_x_head_size": 1024, "head_size": 128, "rotary_dim": 128}
    yield "rope_cos_sin_cache", wide, _ROPE
    yield "rope_cos_sin_cache_inplace", wide, _ROPE
    rope = {**dict.fromkeys(("q_rope", "k_rope", "q_nope", "k_nope"), BF16), "cos_sin_cache": FP32, "pos_ids": "int64"}
    yield "mla_rope_quantize_fp8", {"num_q_heads": 128, "rope_dim": 64, "no_rope_dim": 512, "rotary_dim": 64}, rope
    parts = {"num_heads": 128, "nope_dim": 128, "rope_dim": 64, "total_dim": 192, "num_heads_broadcast": 1}
    yield "concat_mla_k", parts, dict.fromkeys(("k", "k_nope", "k_rope"), BF16)
    for experts, chosen in ((256, 8), (64, 6)):
        routed = {"scores": FP32, "bias": FP32, "topk_values": FP32, "topk_indices": "int32"}
        yield "fused_topk_deepseek", {"num_experts": experts, "topk": chosen}, routed
    yield from _served_calls()


def _served_calls() -> Iterator[Call]:
    """Those of servers: attention with tables of pages, indexers, quantizers and grouped products."""
    latent = {"num_heads": 128, "num_heads_qo": 128, "head_dim_qk": 576, "kv_lora_rank": 512, "head_dim_ckv": 512}
    latent |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_kv_heads": 1, "sparse_mla_top_k": 2048}
    index = dict.fromkeys(("block_tables", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"), "int32")
    states = dict.fromkeys(("query", "kv_cache", "q", "k_cache", "v_cache", "output"), BF16) | index
    for name in ("trtllm_batch_decode_mla_dense", "trtllm_batch_decode_mla_ragged", "xqa_batch_decode_mla"):
        yield name, {**latent, "page_size": 64}, states
    yield "cute_dsl_batch_mla_run", {**latent, "page_size": 64}, states
    yield "xqa_mla", {**latent, "page_size": 64, "beam_width": 1}, states
    yield "trtllm_batch_decode_mla_sparse", {**latent, "page_size": 1}, states
    ragged = {"num_heads": 128, "head_dim_qk": 192, "head_dim_v": 128}
    yield "trtllm_ragged_attention_deepseek", ragged, index | dict.fromkeys(("query", "key", "value"), BF16)
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "kv_cache_dim": 2}
    heads |= {"num_heads_qo": 32, "num_heads_kv": 8, "beam_width": 1}
    for name in (
        *("trtllm_batch_decode", "trtllm_batch_context", "xqa_batch_decode"),
        *("cudnn_batch_decode", "cudnn_batch_prefill", "xqa"),
    ):
        yield name, heads, states
    yield "top_k_varlen", {"top_k": 2048}, {"logits": FP32, "seq_lens": "int32"}
    for name in ("top_k_page_table_transform", "top_k_ragged_transform"):
        rows = ("src_page_table", "lengths", "row_to_batch", "offsets")
        yield name, {"k": 2048, "page_size": 1}, {"input": FP32, **dict.fromkeys(rows, "int32")}
    routed = {"router_logits": FP32, "input_ids": "int64", "tid2eid": "int32"}
    yield "hash_topk", {"num_routed_experts": 256, "topk": 6, "vocab": 129280}, routed
    for name in ("single_decode", "single_prefill"):
        yield name, _GQA, dict.fromkeys(("q", "k", "v"), BF16)
    yield "batch_attention_run", {"num_qo_heads": 32, "head_dim": 128}, {"q": BF16}
    for name in ("nvfp4_quantize", "fp4_quantize", "nvfp4_kv_quantize"):
        tensors = {"a": BF16, "input": BF16, "a_global_sf": FP32, "global_scale": FP32}
        yield name, {"K": 2048, "one": 1, "scalar": 1, "sf_vec_size": 16}, tensors
    blocks = {"K": 7168, "N": 512, "K_div_128": 56, "N_div_128": 4}
    scaled = {"a": FP8, "b": FP8, "a_scale": FP32, "b_scale": FP32, "masked_m": "int32", "m_indices": "int32"}
    yield "group_gemm_fp8_nt_groupwise_contiguous", {**blocks, "num_groups": 256}, scaled
    yield "batch_deepgemm_fp8_nt_groupwise", blocks, scaled
