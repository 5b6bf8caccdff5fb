"""SGLang's nvfp4 kernels for the experts, which run on Blackwell, and the layout of their scales."""

from __future__ import annotations

import torch

from flashinfer_trace.families.moe.grouped_gemm_kernels import ROWS, filled, problem_sizes
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Kernel, KernelCall, Outputs

MODULE = "sglang.jit_kernel.nvfp4"
#: Scales are stored in tiles of this many rows and blocks.
TILE_ROWS, TILE_BLOCKS = 128, 4


def padded_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """The first row of each expert, and the end, where each has whole tiles: int32 [num_experts + 1]."""
    lengths = (offsets.diff() + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def padded_rows(offsets: torch.Tensor) -> torch.Tensor:
    """Where each row is among the padded ones, int64."""
    shift = (padded_offsets(offsets) - offsets)[:-1].long()
    return torch.arange(int(offsets[-1]), device=offsets.device) + shift.repeat_interleave(offsets.diff().long())


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, blocks] in whole tiles -> the same bytes in the order of the kernel: a tile has 32 x 4 x 4."""
    *first, rows, blocks = scales.shape
    tiles = scales.view(torch.uint8).reshape(-1, rows // TILE_ROWS, 4, 32, blocks // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(*first, rows, blocks).view(scales.dtype)


def unswizzled(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `swizzled`, for [rows, blocks]."""
    rows, blocks = scales.shape
    tiles = scales.view(torch.uint8).reshape(rows // TILE_ROWS, blocks // TILE_BLOCKS, 32, 4, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(rows, blocks).view(scales.dtype)


def whole_tiles(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., n, blocks] padded by zeros to `rows` rows and whole tiles of blocks."""
    missing = -scales.shape[-1] % TILE_BLOCKS
    padding = (0, missing, 0, rows - scales.shape[-2])
    return torch.nn.functional.pad(scales.view(torch.uint8), padding).view(scales.dtype)


def run_quant(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.jit_kernel.nvfp4 import scaled_fp4_experts_quant

    offsets, blocks = inputs["expert_offsets"], definition.const_axes["num_k_blocks"]
    codes, scales = scaled_fp4_experts_quant(
        inputs["input"], inputs["input_global_scale"], offsets, padded_offsets(offsets), 1
    )
    rows = int(padded_offsets(offsets)[-1])
    listed = unswizzled(scales[:rows]).view(torch.uint8)[padded_rows(offsets), :blocks].contiguous()
    return {"codes": codes.view(torch.int8), "scales": listed.view(torch.float8_e4m3fn)}


def run_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.jit_kernel.nvfp4 import cutlass_fp4_group_mm

    axes, offsets = definition.const_axes, inputs["expert_offsets"]
    device, padded = offsets.device, padded_offsets(offsets)
    spread = torch.zeros(int(padded[-1]), axes["num_k_blocks"], dtype=torch.uint8, device=device)
    spread[padded_rows(offsets)] = inputs["a_scale"].view(torch.uint8)
    a_scale = whole_tiles(spread.view(torch.float8_e4m3fn), len(spread))
    b_scale = whole_tiles(inputs["b_scale"], -(-axes["n"] // TILE_ROWS) * TILE_ROWS)
    output = cutlass_fp4_group_mm(
        inputs["a"].view(torch.uint8),
        inputs["b"].view(torch.uint8),
        swizzled(a_scale),
        swizzled(b_scale),
        inputs["alphas"],
        torch.bfloat16,
        {
            "ab_strides": filled(axes["num_experts"], axes["k"], device),
            "c_strides": filled(axes["num_experts"], axes["n"], device),
            "problem_sizes": problem_sizes(inputs, axes["n"], axes["k"]),
            "expert_offsets": offsets[:-1],
            "blockscale_offsets": padded[:-1],
        },
    )
    return {"output": output}


def blackwell(name: str, call: KernelCall) -> Kernel:
    return Kernel(f"{MODULE}.{name}", call, limits=ROWS)


QUANT = blackwell("scaled_fp4_experts_quant", run_quant)
GEMM = blackwell("cutlass_fp4_group_mm", run_gemm)
