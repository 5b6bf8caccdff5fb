"""Linear layers in nvfp4: e2m1 numbers in blocks of 16 with an e4m3 scale, as Blackwell's tensor cores read them."""

from __future__ import annotations

import torch

from flashinfer_trace.families.gemm import product_bound
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected

BLOCK = 16
#: ``integers``: numbers -4..4 without halves, scales and alpha that are powers of two: sums are exact.
KINDS = ("normal", "integers", "positive", "large", "tiny")
FACTORS = {"large": 1000.0, "tiny": 0.001, "huge": 1e6, "minute": 1e-7}
#: Codes of 0, 1, 2, 3, 4 and their negatives.
INTEGERS = (0, 2, 4, 5, 6, 10, 12, 13, 14)


def corners(request: PlanRequest) -> list[Plan]:
    """More than one tile of scales, sums of one sign, an alpha beyond float16's range; on a CPU, any scales of
    blocks."""
    kinds = {"huge": 3, "minute": 3, "normal" if request.large else "wide": 40, "positive": 129}
    return [{"m": m, "values": values} for values, m in kinds.items()]


PLAN = RowPlans({"m": Count(140, 512)}, {"values": KINDS}, special=corners, many_rows=300)


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def numbers(draws: Draws, rows: int, k: int, kind: str) -> torch.Tensor:
    """Packed e2m1 numbers [rows, k / 2] int8."""
    if kind == "integers":
        pool = torch.tensor(INTEGERS, device=draws.device)
    else:
        pool = torch.arange(8 if kind == "positive" else 16, device=draws.device)
    pairs = (pool[:, None] + 16 * pool).flatten().to(torch.uint8).view(torch.int8)
    return pairs[draws.integers([rows, k // 2], 0, len(pairs) - 1)]


def block_scales(draws: Draws, rows: int, k: int, kind: str) -> torch.Tensor:
    """e4m3 scales as stored, [rows padded to 128, k / 16 padded to 4]. The padding holds scales like the others."""
    shape = [padded(rows, 128), padded(k // BLOCK, 4)]
    if kind == "integers":
        return torch.exp2(draws.integers(shape, -1, 1).float()).to(torch.float8_e4m3fn)
    if kind == "wide":
        return draws.integers(shape, 1, 126, torch.uint8).view(torch.float8_e4m3fn)
    return torch.exp2(draws.uniform(shape, -4.0, 6.0)).to(torch.float8_e4m3fn)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    n, k, kind = definition.const_axes["n"], definition.const_axes["k"], plan["values"]
    alpha = 0.25 if kind == "integers" else FACTORS.get(kind, 1.0) * 2.0 ** draws.uniform([], -2, 2).item() / 3000
    return {
        "A": numbers(draws, plan["m"], k, kind),
        "B": numbers(draws, n, k, kind),
        "A_scale": block_scales(draws, plan["m"], k, kind),
        "B_scale": block_scales(draws, n, k, kind),
        "alpha": alpha,
    }


def value_of(code: torch.Tensor) -> torch.Tensor:
    """e2m1 codes 0..15 -> float64, by the fields: sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = 1 - 2 * (code // 8), code // 2 % 4, code % 2
    normal = (2 + mantissa) * torch.exp2(exponent.double() - 2)
    return sign * torch.where(exponent == 0, mantissa * 0.5, normal)


def dequantized(packed: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """float64 [rows, k], by the index at which the scale of each block is stored."""
    rows, k = packed.shape[0], 2 * packed.shape[1]
    every = torch.arange(256, device=packed.device)
    values = torch.stack([value_of(every % 16), value_of(every // 16)], dim=1)[packed.view(torch.uint8).int()]
    row = torch.arange(rows, device=packed.device)[:, None]
    column = torch.arange(k // BLOCK, device=packed.device)[None, :]
    tile = row // 128 * (stored.shape[1] // 4) + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    scales = stored.double().flatten()[place]
    return (values.view(rows, k // BLOCK, BLOCK) * scales[:, :, None]).view(rows, k)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    rows, weights = dequantized(inputs["A"], inputs["A_scale"]), dequantized(inputs["B"], inputs["B_scale"])
    alpha = float(inputs["alpha"])
    magnitude = (weights.abs() @ rows.abs().T).T.contiguous()
    quarters = all(bool((4 * each == (4 * each).round()).all()) for each in (rows, weights))
    exact = rows.numel() > 0 and alpha == 0.25 and quarters and bool(magnitude.max() < 2**20)
    value = (weights @ rows.T).T.contiguous() * alpha
    length = torch.tensor(float(definition.const_axes["k"]))
    return {"C": Expected(value, {"magnitude": magnitude * alpha, "length": length}, exact)}


PRODUCT = ErrorBound(
    product_bound, "one bf16 rounding, u = 2^-8, of a float32 sum: 8 sqrt(k) 2^-24 |A||B|; exact for integers"
)


def operands(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    packed = (inputs[name].view(torch.uint8) for name in ("A", "B"))
    alpha = torch.tensor([inputs["alpha"]], device=inputs["A"].device)
    return (*packed, inputs["A_scale"], inputs["B_scale"], alpha)


def run_jit(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.jit_kernel.nvfp4 import cutlass_scaled_fp4_mm

    return {"C": cutlass_scaled_fp4_mm(*operands(inputs), torch.bfloat16)}


def run_sgl(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    return {"C": sgl_kernel.cutlass_scaled_fp4_mm(*operands(inputs), torch.bfloat16)}


FAMILIES = (
    Family(
        name="cutlass_scaled_fp4_mm",
        op_type="gemm",
        twin={"n": 160, "k": 224, "k_bytes": 112, "padded_n": 256, "padded_scales": 16},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"C": PRODUCT},
        kernels=(
            Kernel("sglang.jit_kernel.nvfp4.cutlass_scaled_fp4_mm", run_jit, limits={"m": (1, 1 << 20)}),
            Kernel("sgl_kernel.cutlass_scaled_fp4_mm", run_sgl, limits={"m": (1, 1 << 20)}),
        ),
        unverified="it needs compute capability 10.0 (Blackwell)",
    ),
)
