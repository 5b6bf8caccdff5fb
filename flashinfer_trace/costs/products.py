"""Costs of matrix products: 2 m n k operations in the dtype of the operands, and what scales the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashinfer_trace.costs.work import CUDA_CORES, CostFunction, Sizes, Work

__all__ = ["COSTS", "FLOAT4"]

#: Operands of four bits, two in a byte, with scales of blocks.
FLOAT4 = "float4_e2m1fn"


def product(dtype: str, scalings: int = 0, m: str = "m", n: str = "n", k: str = "k") -> CostFunction:
    """A product [m, k] x [k, n], of each of `batch_size` pairs if there is such a constant.

    Args:
        dtype: of the operands, as the tensor cores see them.
        scalings: operations on each element of the result.
        m, n, k: names of the axes.
    """

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        results = sizes.get("batch_size", 1) * sizes[m] * sizes[n]
        products, others = 2 * results * sizes[k], scalings * results
        return Work({CUDA_CORES: others + products} if dtype == CUDA_CORES else {dtype: products, CUDA_CORES: others})

    return work


COSTS: dict[str, CostFunction] = {
    "gemm": product("float16", m="M", n="N", k="K"),
    "gemm_bf16": product("bfloat16"),
    "gemm_bf16_bias": product("bfloat16", 1),
    "gemm_float32_out": product("bfloat16"),
    "gemm_float32": product("float32"),
    "fp8_blockwise_scaled_mm": product("float8_e4m3fn", 2),
    "fp8_scaled_mm": product("float8_e4m3fn", 2),
    "bmm_bf16": product("bfloat16"),
    "bmm_fp8": product("float8_e4m3fn", 1),
    "int8_scaled_mm": product("int8", 2),
    # Weights of four bits are widened to int8 on their way to the tensor cores.
    "qserve_w4a8_per_chn_gemm": product("int8", 4),
    "qserve_w4a8_per_group_gemm": product("int8", 2),
    "cutlass_scaled_fp4_mm": product(FLOAT4, 1),
}
