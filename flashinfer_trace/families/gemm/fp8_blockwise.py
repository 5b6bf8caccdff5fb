"""Linear layers with weights in fp8 blocks of 128 x 128, and activations in fp8 groups of 128: those of DeepSeek-V3."""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm.fp8 import PLAN, PRODUCT, codes, factor, powers_of_two, scales, whole
from flashinfer_trace.families.gemm.truncation import TRUNCATED, no_loss, truncated_parts, truncated_product
from flashinfer_trace.families.quantized import BLOCK
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import ROWS_SPREAD, SCALES_SPREAD, Draws
from flashinfer_trace.verdict.compare import Expected

#: Outputs of all blocks that the oracle computes at once: about 1 GB.
LARGEST_BATCH = 2**24

SGLANG = "sglang.kernels.ops.gemm.fp8_kernel"


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, kind = definition.const_axes, plan["values"]
    m, n, k, k_blocks = plan["m"], axes["n"], axes["k"], axes["num_k_blocks"]
    return {
        "A": codes(draws, [m, k], kind),
        "B": codes(draws, [n, k], kind),
        "A_scale": scales(draws, [m, k_blocks], kind, factor(kind), ROWS_SPREAD),
        "B_scale": scales(draws, [axes["num_n_blocks"], k_blocks], kind, k**-0.5, SCALES_SPREAD),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The float64 product: each block's codes are multiplied, then scaled, then added up.

    With integer codes and scales that are powers of two, sums are multiples of the smallest product of two scales.
    """
    a, b = inputs["A"].double(), inputs["B"].double()
    row_scales = inputs["A_scale"].double()
    column_scales = inputs["B_scale"].double().repeat_interleave(BLOCK, dim=0)[: len(b)]
    total = no_loss(a, b)
    magnitude = torch.zeros_like(total.product)
    # Blocks have accumulators of their own: many are computed at once, as memory allows.
    blocks_a, blocks_b = (x.unflatten(1, (-1, BLOCK)).transpose(0, 1) for x in (a, b))
    at_once = max(1, LARGEST_BATCH // max(1, magnitude.numel()))
    for first in range(0, len(blocks_a), at_once):
        part = slice(first, first + at_once)
        own_a, own_b = blocks_a[part], blocks_b[part]
        scale = row_scales.T[part].unsqueeze(2) * column_scales.T[part].unsqueeze(1)
        total.add(truncated_product(own_a, own_b), scale)
        magnitude += ((own_a.abs() @ own_b.abs().mT) * scale).sum(dim=0)
    exact = magnitude.numel() > 0 and all(map(powers_of_two, (row_scales, column_scales))) and whole(a) and whole(b)
    exact = exact and bool(magnitude.max() < 2**24 * row_scales.min() * column_scales.min())
    parts = truncated_parts(total, torch.ones_like(magnitude))
    length = torch.tensor(float(a.shape[1]))
    return {"C": Expected(total.product, {**parts, "magnitude": magnitude, "length": length}, exact)}


def columns_first(matrix: torch.Tensor, alignment: int = 1) -> torch.Tensor:
    """A copy whose columns are contiguous; they begin at multiples of `alignment` elements."""
    rows, columns = matrix.shape
    aligned = -(-rows // alignment) * alignment
    return matrix.new_zeros(columns, aligned).t()[:rows].copy_(matrix)


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    product = sgl_kernel.fp8_blockwise_scaled_mm(
        inputs["A"], inputs["B"].T, columns_first(inputs["A_scale"]), inputs["B_scale"].T, torch.bfloat16
    )
    return {"C": product}


def run_deep_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import deep_gemm

    activations = (inputs["A"], columns_first(inputs["A_scale"], 4))
    deep_gemm.fp8_gemm_nt(activations, (inputs["B"], inputs["B_scale"]), outputs["C"])
    return outputs


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.gemm.fp8_kernel import w8a8_block_fp8_matmul_triton

    product = w8a8_block_fp8_matmul_triton(
        inputs["A"], inputs["B"], inputs["A_scale"], inputs["B_scale"], [BLOCK, BLOCK], torch.bfloat16
    )
    return {"C": product}


ROWS = {"m": (1, 1 << 20)}


FAMILIES = (
    Family(
        name="fp8_blockwise_scaled_mm",
        op_type="gemm",
        twin={"n": 192, "k": 384, "num_n_blocks": 2, "num_k_blocks": 3},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("A",),
        oracle=oracle,
        compare={"C": PRODUCT},
        kernels=(
            Kernel("sgl_kernel.fp8_blockwise_scaled_mm", run_sgl, limits=ROWS, compare={"C": TRUNCATED}),
            Kernel("deep_gemm.fp8_gemm_nt", run_deep_gemm, limits=ROWS, compare={"C": TRUNCATED}),
            Kernel(f"{SGLANG}.w8a8_block_fp8_matmul_triton", run_triton, limits=ROWS, compare={"C": TRUNCATED}),
        ),
    ),
)
