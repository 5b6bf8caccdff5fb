"""Costs of what is computed row by row from all of its inputs: norms, activations, quantizers, merges, copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Sizes, Work

#: Operations for each element, as the formulas of the references have them.
RMSNORM = 4  # square, sum; times the root, times the weight
LAYERNORM = 7  # sum, minus the mean; square, sum; times the root, times the weight, plus the bias
SILU = 5  # negation, exp, 1 + ., quotient; times up
GELU = 5  # times sqrt(1/2), erf, 1 + ., times x / 2; times up
GELU_TANH = 9  # x^3 (2), times 0.044715, + x, times sqrt(2/pi), tanh, 1 + ., times x / 2; times up
QUANTIZE = 4  # absolute value, maximum, quotient, conversion
MERGE = 3  # two products and a sum
MERGE_ROW = 8  # maximum, two differences, two exponentials, a sum, two quotients
SOFTMAX = 5  # quotient, maximum, exp of the difference, sum, quotient
ROTATE = 3  # two products and a sum
NVFP4 = 5  # absolute value, maximum, product, rounding, packing


def each(per_element: int, *axes: str) -> CostFunction:
    """So many operations for each element of a tensor with these axes; everything is read and written."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        return Work({CUDA_CORES: per_element * math.prod(sizes[axis] for axis in axes)})

    return work


def merge(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    rows = sizes["seq_len"] * sizes["num_heads"]
    return Work({CUDA_CORES: rows * (MERGE * sizes["head_dim"] + MERGE_ROW)})


def qknorm(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    heads = sizes["num_qo_heads"] + sizes["num_kv_heads"]
    return Work({CUDA_CORES: RMSNORM * sizes["num_tokens"] * heads * sizes["head_dim"]})


def rows_named(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Which of so many rows some indices name; negative ones name none."""
    flat = indices.flatten().long()
    flat = flat[(flat >= 0) & (flat < rows)]
    return torch.zeros(rows, dtype=torch.bool, device=flat.device).index_fill_(0, flat, True)


def rope(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Angles are read at the positions of the tokens."""
    heads = sizes["num_qo_heads"] + sizes["num_kv_heads"]
    angles = rows_named(inputs["positions"], sizes["max_seq_len"])
    count = ROTATE * sizes["num_tokens"] * heads * sizes["rotary_dim"]
    return Work({CUDA_CORES: count}, reads={"cos_sin_cache": angles})


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


def store(*caches: str, at: str) -> CostFunction:
    """New rows are copied into caches: only these rows are written, and none of the caches is read."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        slots = rows_named(inputs[at], sizes["num_slots"])
        nothing = torch.zeros_like(slots)
        return Work({}, dict.fromkeys(caches, nothing), {f"{cache}_out": slots for cache in caches})

    return work


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


_HIDDEN = ("batch_size", "hidden_size")
_TOKENS = ("num_tokens", "hidden_size")
_VOCABULARY = ("batch_size", "vocab_size")

COSTS: dict[str, CostFunction] = {
    **{f"rmsnorm{suffix}": each(RMSNORM, *_HIDDEN) for suffix in ("", "_eps1e5")},
    **{
        f"fused_add_rmsnorm{residual}{suffix}": each(RMSNORM + 1, *_HIDDEN)
        for residual in ("", "_residual_out")
        for suffix in ("", "_eps1e5")
    },
    "rmsnorm_silu_gate": each(RMSNORM + SILU, "num_rows", "head_dim"),
    "rmsnorm_sigmoid_gate": each(RMSNORM + SILU, "num_rows", "head_dim"),
    "silu_gate_grouped_rmsnorm": each(RMSNORM + SILU, *_TOKENS),
    "gemma_rmsnorm": each(RMSNORM, *_HIDDEN),
    "gemma_fused_add_rmsnorm": each(RMSNORM + 1, *_HIDDEN),
    **{f"fused_qknorm{suffix}": qknorm for suffix in ("", "_eps1e5")},
    **{f"layernorm{suffix}": each(LAYERNORM, *_HIDDEN) for suffix in ("", "_eps1e5")},
    "silu_and_mul": each(SILU, "num_tokens", "intermediate_size"),
    "silu_and_mul_per_token_group_quant_fp8": each(SILU + QUANTIZE, "num_tokens", "intermediate_size"),
    "gelu_and_mul": each(GELU, "num_tokens", "intermediate_size"),
    "gelu_tanh_and_mul": each(GELU_TANH, "num_tokens", "intermediate_size"),
    "concat_mla_absorb_q": each(0),
    "concat_mla_k": each(0),
    "set_mla_kv_buffer": store("kv_buffer", at="loc"),
    "quantize_k_cache": each(QUANTIZE, "num_tokens", "head_dim_ckv"),
    "dequantize_k_cache": dequantize_slots,
    "store_cache": store("k_cache", "v_cache", at="indices"),
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
    "rope_with_cos_sin": rope_of_rows,
    "mla_rope_quantize_fp8": rope_and_quantize,
    "softmax_temperature": each(SOFTMAX, *_VOCABULARY),
    "hadamard_transform": hadamard,
}
