"""nvfp4 for the experts: the quantizer of rows sorted by expert, and their grouped product. Blackwell only."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from flashinfer_trace.families.moe.expert_gemm import PRODUCT
from flashinfer_trace.families.moe.grouped_gemm import (
    PLAN,
    ROWS,
    activations,
    expected_output,
    offsets_of,
    problem_sizes,
)
from flashinfer_trace.families.moe.kernels import filled
from flashinfer_trace.families.quantized import nibbles
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Comparison, Elementwise, Expected, place, wrong_shape
from flashinfer_trace.verdict.intervals import Interval

BLOCK = 16
LARGEST = 6.0
E4M3_MAX = 448.0
#: Magnitudes of the codes 0 to 7.
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Quotients this close to a boundary, relative to themselves, may round either way: approximate reciprocals of 1 / 6,
#: of the global scale and of the block's scale, each within 2^-22, and three products in float32.
NEAR = 2.0**-19


def values_of(packed: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=torch.float64, device=packed.device)
    return levels[nibbles(packed).long()]


@dataclass(frozen=True)
class PackedFp4(Elementwise):
    """Two fp4 codes in a byte: each must mean a number between the parts ``low`` and ``high``, [..., 2n]. With `signs`,
    the sign of each must be that of the part ``negative``, also where it means zero."""

    reason: str
    signs: bool = False

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        if actual.shape != expected.value.shape:
            return wrong_shape(actual, expected.value)
        found, low, high = values_of(actual), expected.parts["low"], expected.parts["high"]
        wrong = (found < low) | (found > high)
        if self.signs:
            wrong |= found.signbit() != expected.parts["negative"]
        if not wrong.any():
            return Comparison(0.0)
        index = place(int(wrong.flatten().int().argmax()), wrong.shape)
        detail = f"{int(wrong.sum())} of {wrong.numel()} codes differ"
        return Comparison(math.inf, math.inf, index, float(found[index]), float(low[index]), 0.0, detail)


NEAREST = "the nearest fp4 number; either one within 2^-19 of halfway, and for either scale of such a block"
CODES = PackedFp4(f"{NEAREST}; with the sign of its feature, also where it is zero", signs=True)
#: Its conversion to fp4 is an instruction that has not been run here, so the signs of its zeros are unknown.
CODES_OF_KERNEL = PackedFp4(f"{NEAREST}; a zero of either sign")
SCALES = Interval(
    lambda expected: (expected.parts["low"], expected.parts["high"]),
    "the nearest e4m3 number; either one within 2^-19 of halfway",
)


# The quantizer


def quant_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Blocks whose magnitudes differ widely, and global scales around that at which the largest scale is 448: the
    smallest scales are zero, the largest beyond the largest number."""
    rows = activations(definition, plan, draws)
    blocks = torch.exp2(draws.uniform([len(rows), rows.shape[1] // BLOCK], -24.0, 0.0))
    rows = rows * blocks.repeat_interleave(BLOCK, dim=1)
    largest = float(rows.abs().max()) if rows.numel() and float(rows.abs().max()) else 1.0
    spread = torch.exp2(draws.uniform([definition.const_axes["num_experts"]], -2.0, 2.0))
    return {
        "input": rows.to(torch.bfloat16),
        "input_global_scale": spread * (E4M3_MAX * LARGEST / largest),
        "expert_offsets": offsets_of(definition, plan, draws),
    }


def rounded_both_ways(values: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of a grid that each non-negative value may round to: equal unless it is close to halfway."""
    halfway: torch.Tensor = (grid[1:] + grid[:-1]) / 2
    low = torch.bucketize(values * (1 - NEAR), halfway)
    high = torch.bucketize(values * (1 + NEAR), halfway, right=True)
    return grid[low], grid[high]


def quant_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """By comparison with the boundaries between neighboring numbers; both where a value is close to one."""
    rows, ends = inputs["input"].double(), inputs["expert_offsets"].tolist()
    factor = torch.empty(len(rows), 1, 1, dtype=torch.float64, device=rows.device)
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        factor[start:end] = inputs["input_global_scale"][expert].double()
    blocks = rows.view(len(rows), rows.shape[1] // BLOCK, BLOCK)
    exact = factor * blocks.abs().amax(dim=2, keepdim=True) / LARGEST
    grid = torch.arange(127, dtype=torch.uint8, device=rows.device).view(torch.float8_e4m3fn).double()
    scales = rounded_both_ways(exact, grid)
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=rows.device)
    found = []
    for scale in scales:
        quotient = torch.where(scale > 0, blocks.abs() * factor / scale, 0.0)
        found += [both * blocks.sign() for both in rounded_both_ways(quotient, levels)]
    codes = torch.stack(found).flatten(2)
    packed = torch.zeros(len(rows), rows.shape[1] // 2, dtype=torch.int64, device=rows.device)
    sides = {"low": codes.amin(dim=0), "high": codes.amax(dim=0), "negative": rows.signbit()}
    low, high = (scale.squeeze(2) for scale in scales)
    return {"codes": Expected(packed, sides), "scales": Expected(low, {"low": low, "high": high})}


# The product


def drawn_tensor(shape: list[int], whole: bool, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes of shape [..., k] in bytes, and their scales: 1 if `whole`, which makes sums exact."""
    codes = draws.integers([*shape[:-1], shape[-1] // 2], -128, 127, torch.int8)
    scales = draws.uniform([*shape[:-1], shape[-1] // BLOCK], 0.5, 8.0)
    return codes, (torch.ones_like(scales) if whole else scales).to(torch.float8_e4m3fn)


def gemm_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, whole = definition.const_axes, plan["values"] == "integers"
    size = {"large": 300.0, "tiny": 0.01, "huge": 1e5}.get(plan["values"], 1.0)
    a, a_scale = drawn_tensor([plan["total_rows"], axes["k"]], whole, draws)
    b, b_scale = drawn_tensor([axes["num_experts"], axes["n"], axes["k"]], whole, draws)
    if plan["zero_row"] and len(a):
        a[len(a) // 2] = 0
    alphas = torch.exp2(draws.uniform([axes["num_experts"]], -1.0, 1.0)) * (size / axes["k"] ** 0.5)
    return {
        "a": a,
        "a_scale": a_scale,
        "b": b,
        "b_scale": b_scale,
        "alphas": torch.ones_like(alphas) if whole else alphas,
        "expert_offsets": offsets_of(definition, plan, draws),
    }


def scaled_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = values_of(codes) * scales.double().repeat_interleave(BLOCK, dim=-1)
    return result


def gemm_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Codes are multiples of one half: with scales of 1, all sums are exact in float32."""

    def weights(expert: int) -> torch.Tensor:
        own: torch.Tensor = inputs["alphas"][expert].double()
        return scaled_values(inputs["b"][expert], inputs["b_scale"][expert]) * own

    ones = all(bool((inputs[name].float() == 1).all()) for name in ("a_scale", "b_scale", "alphas"))
    return expected_output(definition, inputs, scaled_values(inputs["a"], inputs["a_scale"]), weights, ones)


# The kernels

MODULE = "sglang.jit_kernel.nvfp4"
#: Scales are stored in tiles of this many rows and blocks.
TILE_ROWS, TILE_BLOCKS = 128, 4


def padded_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """The first row of each expert, and the end, where each has whole tiles: int32 [num_experts + 1]."""
    lengths = (offsets.diff() + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def padded_rows(offsets: torch.Tensor) -> torch.Tensor:
    shift = (padded_offsets(offsets) - offsets)[:-1].long()
    return torch.arange(int(offsets[-1]), device=offsets.device) + shift.repeat_interleave(offsets.diff().long())


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, blocks] in whole tiles -> the same bytes in the order of the kernel: a tile is [32, 4, 4]."""
    *first, rows, blocks = scales.shape
    tiles = scales.view(torch.uint8).reshape(-1, rows // TILE_ROWS, 4, 32, blocks // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(*first, rows, blocks).view(scales.dtype)


def unswizzled(scales: torch.Tensor) -> torch.Tensor:
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


#: Why there is no evidence.
UNVERIFIED = "its kernel needs a Blackwell GPU (compute capability 10.0), which no runner has"
TWIN = {"num_experts": 5, "num_offsets": 6, "k": 160, "k_bytes": 80, "num_k_blocks": 10}
FAMILIES = (
    Family(
        name="moe_nvfp4_experts_quant",
        op_type="moe",
        twin=TWIN,
        plan=PLAN,
        make_inputs=quant_inputs,
        oracle=quant_oracle,
        compare={"codes": CODES, "scales": SCALES},
        kernels=(
            Kernel(f"{MODULE}.scaled_fp4_experts_quant", run_quant, limits=ROWS, compare={"codes": CODES_OF_KERNEL}),
        ),
        unverified=UNVERIFIED,
    ),
    Family(
        name="moe_nvfp4_grouped_gemm",
        op_type="moe",
        twin={**TWIN, "n": 24},
        plan=PLAN,
        make_inputs=gemm_inputs,
        oracle=gemm_oracle,
        compare={"output": PRODUCT},
        kernels=(Kernel(f"{MODULE}.cutlass_fp4_group_mm", run_gemm, limits=ROWS),),
        unverified=UNVERIFIED,
    ),
)
