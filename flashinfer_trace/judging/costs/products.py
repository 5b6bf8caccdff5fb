"""Costs of matrix products: 2 m n k operations in the dtype of the operands, and what scales the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Sizes, Work

#: Operands of four bits, two in a byte, with a scale for each block of this many.
FLOAT4, BLOCK = "float4_e2m1fn", 16


def product(dtype: str, scalings: int = 0, m: str = "m", n: str = "n", k: str = "k") -> CostFunction:
    """A product [m, k] x [k, n], of each of `batch_size` pairs if there is such a constant, with so many operations on
    each element of the result."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        results = sizes.get("batch_size", 1) * sizes[m] * sizes[n]
        products, others = 2 * results * sizes[k], scalings * results
        return Work({CUDA_CORES: others + products} if dtype == CUDA_CORES else {dtype: products, CUDA_CORES: others})

    return work


def fp4_product(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A product of operands of four bits, whose scales are padded: padding is not read."""
    work = product(FLOAT4, 1)(sizes, inputs)
    padded = {"A_scale": ("m", "padded_m"), "B_scale": ("n", "padded_n")}
    return replace(work, reads={name: tiled_scales(sizes, *axes) for name, axes in padded.items()})


def tiled_scales(sizes: Sizes, rows: str, padded: str) -> torch.Tensor:
    """Which scales of the tensor core's tiles of 128 x 4 belong to blocks: row 32 i + j is at (j, i) of a tile."""
    used = torch.zeros(sizes[padded], sizes["padded_scales"], dtype=torch.bool)
    used[: sizes[rows], : sizes["k"] // BLOCK] = True
    tiles = used.view(-1, 4, 32, sizes["padded_scales"] // 4, 4).transpose(1, 3)
    return tiles.reshape(used.shape)


COSTS: dict[str, CostFunction] = {
    "gemm": product("float16", m="M", n="N", k="K"),
    "gemm_bf16": product("bfloat16"),
    "gemm_bf16_bias": product("bfloat16", 1),
    "gemm_float32_out": product("bfloat16"),
    "gptq_marlin_gemm": product("bfloat16", 1),
    "gemm_float32": product("float32"),
    "fp8_blockwise_scaled_mm": product("float8_e4m3fn", 2),
    "fp8_scaled_mm": product("float8_e4m3fn", 2),
    "bmm_bf16": product("bfloat16"),
    "bmm_fp8": product("float8_e4m3fn", 1),
    "int8_scaled_mm": product("int8", 2),
    # Weights of four bits are widened to int8 on their way to the tensor cores.
    "qserve_w4a8_per_chn_gemm": product("int8", 4),
    "qserve_w4a8_per_group_gemm": product("int8", 2),
    "cutlass_scaled_fp4_mm": fp4_product,
}
