"""Costs of what is computed row by row from all of its inputs: norms, activations, quantizers, merges, copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Sizes, Work, each

#: Operations for each element, as the formulas of the references have them.
RMSNORM = 4  # square, sum; times the root, times the weight
LAYERNORM = 7  # sum, minus the mean; square, sum; times the root, times the weight, plus the bias
SILU = 5  # negation, exp, 1 + ., quotient; times up
GELU = 5  # times sqrt(1/2), erf, 1 + ., times x / 2; times up
GELU_TANH = 9  # x^3 (2), times 0.044715, + x, times sqrt(2/pi), tanh, 1 + ., times x / 2; times up
SITU = 6  # quotient, tanh, product, of the gate and of up, plus the sigmoid and its product with up
QUANTIZE = 4  # absolute value, maximum, quotient, conversion
MERGE = 3  # two products and a sum
MERGE_ROW = 8  # maximum, two differences, two exponentials, a sum, two quotients
SOFTMAX = 5  # quotient, maximum, exp of the difference, sum, quotient
ROTATE = 3  # two products and a sum
NVFP4 = 5  # absolute value, maximum, product, rounding, packing


def merge(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    rows = sizes["seq_len"] * sizes["num_heads"]
    return Work({CUDA_CORES: rows * (MERGE * sizes["head_dim"] + MERGE_ROW)})


def qknorm(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    heads = sizes["num_qo_heads"] + sizes["num_kv_heads"]
    return Work({CUDA_CORES: RMSNORM * sizes["num_tokens"] * heads * sizes["head_dim"]})


def qkv_norm(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    heads = sizes["num_qo_heads"] + 2 * sizes["num_kv_heads"]
    return Work({CUDA_CORES: RMSNORM * sizes["num_tokens"] * heads * sizes["head_dim"]})


def rows_named(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Which of so many rows some indices name; negative ones name none."""
    flat = indices.flatten().long()
    flat = flat[(flat >= 0) & (flat < rows)]
    return torch.zeros(rows, dtype=torch.bool, device=flat.device).index_fill_(0, flat, True)


def rope(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    heads = sizes["num_qo_heads"] + sizes["num_kv_heads"]
    angles = rows_named(inputs["positions"], sizes["max_seq_len"])
    count = ROTATE * sizes["num_tokens"] * heads * sizes["rotary_dim"]
    return Work({CUDA_CORES: count}, reads={"cos_sin_cache": angles})


def qknorm_rope(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """All features are normalized; angles are read at the positions of the tokens."""
    turned = rope(sizes, inputs)
    normed = qknorm({**sizes, "head_dim": sizes["head_size"]}, inputs)
    return Work({CUDA_CORES: turned.operations[CUDA_CORES] + normed.operations[CUDA_CORES]}, turned.reads)


def rope_of_rows(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Each token has its own cosines and sines."""
    heads = sizes["num_qo_heads"] + sizes["num_kv_heads"]
    return Work({CUDA_CORES: ROTATE * sizes["num_tokens"] * heads * sizes["head_size"]})


def rope_and_quantize(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Rotation of the rope parts; a product and a conversion of every element."""
    heads = sizes["num_qo_heads"] + 1
    rotated, all_of_them = sizes["head_dim_kpe"], sizes["head_dim_kpe"] + sizes["head_dim_ckv"]
    count = sizes["num_tokens"] * heads * (ROTATE * rotated + 2 * all_of_them)
    angles = rows_named(inputs["pos_ids"], sizes["max_seq_len"])
    return Work({CUDA_CORES: count}, reads={"cos_sin_cache": angles})


def sinkhorn(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A sum and a quotient of each entry of the matrix 40 times; a product and a sum for each feature of a stream."""
    streams = 2 * sizes["hidden_size"] * sizes["hc"]
    return Work({CUDA_CORES: sizes["num_tokens"] * (streams + SILU * sizes["mix"] + 80 * sizes["hc"] ** 2)})


def store(*caches: str, at: str) -> CostFunction:
    """New rows are copied into caches: only these rows are written, and none of the caches is read."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        slots = rows_named(inputs[at], sizes["num_slots"])
        nothing = torch.zeros_like(slots)
        return Work({}, dict.fromkeys(caches, nothing), {f"{cache}_out": slots for cache in caches})

    return work


def store_quantized(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """New keys are quantized: only their slots are written, and none of the pages is read."""
    slots = rows_named(inputs["out_cache_loc"], sizes["num_pages"] * sizes["page_size"])
    written = slots.view(sizes["num_pages"], sizes["page_size"])
    pages = ("code_pages", "scale_pages")
    count = QUANTIZE * sizes["num_tokens"] * sizes["head_dim"]
    reads = dict.fromkeys(pages, torch.zeros_like(written))
    return Work({CUDA_CORES: count}, reads, {f"{name}_out": written for name in pages})


def dequantize_slots(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A conversion and a product of each compressed feature; only rows of chosen slots are read."""
    count = 2 * sizes["num_tokens"] * sizes["head_dim_ckv"]
    return Work({CUDA_CORES: count}, reads={"kv_cache": rows_named(inputs["slots"], sizes["num_slots"])})


def rope_and_store(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """All features are rotated, and the rows of keys and values are written once more."""
    turned = rope({**sizes, "rotary_dim": sizes["head_size"]}, inputs)
    stored = store("k_cache", "v_cache", at="out_loc")(sizes, inputs)
    return Work(turned.operations, {**turned.reads, **stored.reads}, stored.writes)


def hadamard(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """The fast transform: log2(n) additions for each element, and the scale."""
    size = sizes["head_dim"]
    return Work({CUDA_CORES: sizes["num_rows"] * size * (math.ceil(math.log2(size)) + 1)})


def first_entries(sizes: torch.Tensor | int, room: int) -> torch.Tensor:
    """Which of the entries of a list are the first ones, or of each of several lists."""
    return torch.arange(room) < (sizes.cpu().unsqueeze(-1) if isinstance(sizes, torch.Tensor) else sizes)


def tokens_of_table(inputs: Mapping[str, Any], lens: torch.Tensor, step: int = 1) -> torch.Tensor:
    """Which slots of a table of requests are those of the first tokens of each, or of every so many of them."""
    table = inputs["req_to_token"]
    named = torch.zeros(table.shape, dtype=torch.bool)
    first = inputs["kv_start_idx"].cpu() if "kv_start_idx" in inputs else torch.zeros_like(lens.cpu())
    position = torch.arange(table.shape[1])
    after = position - first[:, None]
    named[inputs["req_pool_indices"].cpu()] = (after >= 0) & (after < lens.cpu()[:, None]) & (after % step == 0)
    return named


def listed(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Of lists that are filled up to the last token, entries are written, and none is read; slots and free pages are
    read where they are named."""
    reads: dict[str, torch.Tensor] = {}
    writes: dict[str, torch.Tensor] = {}
    if "kv_indptr" in inputs:
        lens = inputs["kv_indptr"].diff()
        reads["req_to_token"] = tokens_of_table(inputs, lens)
        written = {"kv_indices": first_entries(int(lens.sum()), sizes["num_kv_indices"])}
    elif "kv_indices" in inputs:
        lens = inputs["paged_kernel_lens"]
        reads["req_to_token"] = tokens_of_table(inputs, lens, sizes["page_size"])
        written = {"kv_indices": first_entries(-(-lens // sizes["page_size"]), sizes["max_pages"])}
    elif "positions" in inputs:
        written = {"positions": first_entries(int(inputs["extend_seq_lens"].sum()), sizes["num_tokens"])}
    elif "out_cache_loc" in inputs:
        written = {"req_to_token": tokens_of_table(inputs, inputs["seq_lens"])}
    else:
        written = {
            "out_indices": first_entries(int((inputs["seq_lens"] - inputs["prefix_lens"]).sum()), sizes["num_tokens"])
        }
    for name, entries in written.items():
        reads[name], writes[f"{name}_out"] = torch.zeros_like(entries), entries
    return Work({}, reads, writes)


def taken_pages(sizes: Sizes, inputs: Mapping[str, Any]) -> torch.Tensor:
    after = inputs["seq_lens"]
    before = inputs.get("prefix_lens", after - 1)
    pages = -(-after // sizes["page_size"]) + -before // sizes["page_size"]
    return first_entries(int(pages.sum()), sizes["num_free"])


def allocated(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Only the free pages that are taken are read."""
    found = listed(sizes, inputs) if "out_indices" in inputs else Work()
    return Work({}, {**found.reads, "free_pages": taken_pages(sizes, inputs)}, found.writes)


def last_slots(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """One slot of each request that has a token."""
    lens = inputs["prefix_lens"]
    ends = tokens_of_table(inputs, lens) & ~tokens_of_table(inputs, (lens - 1).clamp_min(0))
    return Work({}, {"req_to_token": ends})


_HIDDEN = ("batch_size", "hidden_size")
_TOKENS = ("num_tokens", "hidden_size")
_VOCABULARY = ("batch_size", "vocab_size")

COSTS: dict[str, CostFunction] = {
    "clamp_position": each(0),
    "get_last_loc": last_slots,
    **dict.fromkeys(
        ("compute_position", "create_flashinfer_kv_indices", "create_flashmla_kv_indices", "write_req_to_token_pool"),
        listed,
    ),
    **dict.fromkeys(("alloc_decode", "alloc_extend"), allocated),
    **{f"rmsnorm{suffix}": each(RMSNORM, *_HIDDEN) for suffix in ("", "_eps1e5")},
    **{
        f"fused_add_rmsnorm{residual}{suffix}": each(RMSNORM + 1, *_HIDDEN)
        for residual in ("", "_residual_out")
        for suffix in ("", "_eps1e5")
    },
    "rmsnorm_silu_gate": each(RMSNORM + SILU, "num_rows", "head_dim"),
    "rmsnorm_sigmoid_gate": each(RMSNORM + SILU, "num_rows", "head_dim"),
    "silu_gate_grouped_rmsnorm": each(RMSNORM + SILU, *_TOKENS),
    "rmsnorm_quant": each(RMSNORM + 2, *_HIDDEN),
    "fused_add_rmsnorm_quant": each(RMSNORM + 3, *_HIDDEN),
    "qkv_rmsnorm": qkv_norm,
    "rmsnorm_residual_scalar": each(RMSNORM + 2, *_HIDDEN),
    "dual_rmsnorm_residual_scalar": each(3 * RMSNORM + 3, *_HIDDEN),
    "gemma_rmsnorm": each(RMSNORM, *_HIDDEN),
    "gemma_fused_add_rmsnorm": each(RMSNORM + 1, *_HIDDEN),
    **{f"fused_qknorm{suffix}": qknorm for suffix in ("", "_eps1e5")},
    **{f"layernorm{suffix}": each(LAYERNORM, *_HIDDEN) for suffix in ("", "_eps1e5")},
    "silu_and_mul": each(SILU, "num_tokens", "intermediate_size"),
    "silu_and_mul_per_token_group_quant_fp8": each(SILU + QUANTIZE, "num_tokens", "intermediate_size"),
    "silu_and_mul_clamp": each(SILU + 3, "num_tokens", "intermediate_size"),
    "swiglu_oai": each(SILU + 5, "num_tokens", "intermediate_size"),
    "situ_and_mul": each(SILU + SITU, "num_tokens", "intermediate_size"),
    "sigmoid_mul": each(SILU, "num_tokens", "num_heads", "head_dim"),
    "gate_sigmoid_mul_add": each(4, *_TOKENS),  # a product and a sum for the gate, and with it
    "relu2": each(2, "num_tokens", "intermediate_size"),
    "gelu_and_mul": each(GELU, "num_tokens", "intermediate_size"),
    "gelu_tanh_and_mul": each(GELU_TANH, "num_tokens", "intermediate_size"),
    "concat_mla_absorb_q": each(0),
    "fused_qkvzba_split_reshape_cat": each(0),
    "fused_qkv_split_gdn_prefill": each(0),
    "l2norm": each(RMSNORM - 1, "num_rows", "head_size"),
    "fused_store_index_k_cache": store_quantized,
    "concat_mla_k": each(0),
    "set_mla_kv_buffer": store("kv_buffer", at="loc"),
    "quantize_k_cache": each(QUANTIZE, "num_tokens", "head_dim_ckv"),
    "dequantize_k_cache": dequantize_slots,
    "store_cache": store("k_cache", "v_cache", at="indices"),
    "mhc_post": each(10, "num_tokens", "hc", "hidden_size"),  # 5 products and sums for each feature
    "mhc_pre_big_fuse": sinkhorn,
    "hc_head": each(4 + 2 * 4, "num_tokens", "hc", "hidden_size"),  # square, weight; a product for each of 4 streams
    "merge_state": merge,
    "merge_state_base_e": merge,
    **{
        name: each(QUANTIZE, *_TOKENS)
        for name in (
            "per_token_quant_fp8",
            "per_token_quant_int8",
            "per_token_group_quant_fp8",
            "per_token_group_quant_fp8_ue8m0",
            "per_token_group_quant_int8",
        )
    },
    **{f"rope_with_cos_sin_cache_{style}": rope for style in ("neox_style", "neox_style_any_heads", "gptj_style")},
    "rope_with_cos_sin_cache_neox_style_store": rope_and_store,
    **dict.fromkeys(("qk_gemma_rmsnorm_rope", "qk_gemma_rmsnorm_rope_gate"), qknorm_rope),
    "rope_with_cos_sin": rope_of_rows,
    "mla_rope_quantize_fp8": rope_and_quantize,
    "softmax_temperature": each(SOFTMAX, *_VOCABULARY),
    "hadamard_transform": hadamard,
}
