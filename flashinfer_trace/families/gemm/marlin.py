"""Products of bf16 activations with 4-bit weights in GPTQ's format, which Marlin's kernels dequantize as they go.

From the source (SGLang 0.5.23, kernels/jit/csrc/gemm/marlin): q - 8 is exact in bf16, its product with the scale of the
group is rounded to bf16, and tensor cores multiply by it with float32 sums. The effect of this rounding is known.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families import gemm
from flashinfer_trace.families.quantized import varied_scales
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import ROWS_SPREAD, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected

#: Standard deviation of numbers 0..15 that are equally likely.
SIGMA = 4.61
PLAN = RowPlans(
    {"m": Count(40, 512)},
    {"values": gemm.KINDS},
    special=[{"m": 1, "values": "positive"}, {"values": "huge"}, {"values": "minute"}],
    many_rows=300,
)


def packed_numbers(draws: Draws, shape: list[int]) -> torch.Tensor:
    low, high = draws.integers(shape, 0, (1 << 16) - 1), draws.integers(shape, -(1 << 15), (1 << 15) - 1)
    return ((high << 16) | low).to(torch.int32)


def group_scales(draws: Draws, shape: list[int], features: int, kind: str) -> torch.Tensor:
    """bf16 scales [..., groups, n] that give weights a deviation of 1 / sqrt(features). For integers they are powers of
    two; where rows differ widely in magnitude, columns do as well."""
    if kind == "integers":
        return torch.exp2(draws.integers(shape, -2, 1).float()).to(torch.bfloat16)
    scales = varied_scales(draws, shape, features**-0.5 / SIGMA)
    return (scales * draws.powers(shape[-1], *ROWS_SPREAD) if kind == "spread" else scales).to(torch.bfloat16)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    n, k, packed, groups = (definition.const_axes[axis] for axis in ("n", "k", "k_packed", "num_groups"))
    return {
        "A": gemm.drawn(draws, [plan["m"], k], plan["values"], torch.bfloat16),
        "qweight": packed_numbers(draws, [packed, n]),
        "scales": group_scales(draws, [groups, n], k, plan["values"]),
    }


def dequantized(qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 weights [k, n], by division: number j of an int32 is its quotient by 16^j, modulo 16."""
    words = qweight.long() % (1 << 32)
    numbers = torch.stack([words // 16**place % 16 for place in range(8)], dim=1).flatten(0, 1)
    return (numbers.double() - 8) * scales.double().repeat_interleave(len(numbers) // len(scales), dim=0)


def product(a: torch.Tensor, weights: torch.Tensor) -> Expected:
    """a @ weights in float64. Part ``shift``: by how much rounding the weights to bf16 moves it."""
    moved = weights.to(torch.bfloat16).double() - weights
    magnitude = gemm.magnitudes(a, weights.T)
    whole = a.numel() > 0 and bool((a == a.round()).all()) and not moved.any()
    exact = whole and bool(((weights * 8) == (weights * 8).round()).all()) and bool(magnitude.max() < 2**20)
    parts = {"magnitude": magnitude, "length": torch.tensor(float(a.shape[1])), "shift": (a.double() @ moved).abs()}
    return Expected(a.double() @ weights, parts, exact)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return {"C": product(inputs["A"], dequantized(inputs["qweight"], inputs["scales"]))}


ROUNDED_WEIGHTS = ErrorBound(
    lambda expected: gemm.product_bound(expected) + expected.parts["shift"] * (1 + 2**-7),
    f"{gemm.PRODUCT.reason}; weights are rounded to bf16, which moves a result by A times what each is rounded by",
)


def run_marlin(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it, after it has reordered weights and scales."""
    from sgl_kernel.scalar_type import scalar_types
    from sglang.kernels.ops.gemm.gptq_marlin import gptq_marlin_gemm
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
    from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace, marlin_permute_scales

    a, qweight, scales = inputs["A"].contiguous(), inputs["qweight"], inputs["scales"]
    n, k, group = (definition.const_axes[axis] for axis in ("n", "k", "group_size"))
    order = torch.empty(0, dtype=torch.int32, device=a.device)
    weights = gptq_marlin_repack(qweight, order, k, n, 4)
    reordered = marlin_permute_scales(scales, k, n, group)
    result = gptq_marlin_gemm(
        a,
        None,
        weights,
        reordered,
        None,
        None,
        None,
        None,
        marlin_make_workspace(a.device),
        scalar_types.uint4b8,
        size_m=len(a),
        size_n=n,
        size_k=k,
        use_fp32_reduce=True,
    )
    return {"C": result}


FAMILIES = (
    Family(
        name="gptq_marlin_gemm",
        op_type="gemm",
        twin={"n": 24, "k": 64, "k_packed": 8, "group_size": 16, "num_groups": 4},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"C": gemm.PRODUCT},
        strided=("A",),
        isolated=("A",),
        kernels=(
            Kernel(
                "sglang.kernels.ops.gemm.gptq_marlin.gptq_marlin_gemm",
                run_marlin,
                limits={"m": (1, 1 << 20)},
                compare={"C": ROUNDED_WEIGHTS},
            ),
        ),
    ),
)
