"""Linear layers with int8 activations: int8 weights, and QServe's 4-bit weights in one or two levels of scales."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.gemm.fp8 import ROWS, SCALED_ARGUMENTS, factor
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Plan
from flashinfer_trace.harness.inputs import ROWS_SPREAD, SCALES_SPREAD, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, unit_roundoff

#: ``largest``: all codes are -128, so the sum is the largest possible; ``positive``: sums of one sign.
KINDS = ("normal", "positive", "largest", "large", "tiny", "spread")
#: Standard deviation of normal codes.
CODE_SIGMA = 127 / 4
#: float32 roundings: of the sum, and of its product with each scale.
ROUNDINGS = 3

#: The corners have the largest sums, more than float32 holds exactly, and scales beyond the range of float16.
PLAN = RowPlans(
    {"m": Count(40, 512)},
    {"values": KINDS},
    special=[{"values": values} for values in ("positive", "largest", "huge", "minute")],
    many_rows=300,
)


def codes(draws: Draws, shape: list[int], kind: str) -> torch.Tensor:
    if kind == "largest":
        return torch.full(shape, -128, dtype=torch.int8, device=draws.device)
    drawn = draws.normal(shape, scale=CODE_SIGMA).round_().clamp_(-128, 127)
    return (drawn.abs_().clamp_(max=127) if kind == "positive" else drawn).to(torch.int8)


def varied(draws: Draws, count: int, typical: float, spread: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """float32 scales [count], log-uniform within a factor of 4 of `typical` times powers of two of these exponents."""
    found = torch.exp2(draws.uniform([count], -2.0, 2.0)).mul_(typical)
    return found if spread == (0, 0) else found.mul_(draws.powers(count, *spread))


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    n, k, kind = definition.const_axes["n"], definition.const_axes["k"], plan["values"]
    of_rows, of_columns = (ROWS_SPREAD, SCALES_SPREAD) if kind == "spread" else ((0, 0), (0, 0))
    return {
        "A": codes(draws, [plan["m"], k], kind),
        "B": codes(draws, [n, k], kind),
        "A_scale": varied(draws, plan["m"], factor(kind) / CODE_SIGMA, of_rows),
        "B_scale": varied(draws, n, k**-0.5 / CODE_SIGMA, of_columns),
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return {"C": Expected(integer_product(inputs["A"], inputs["B"]) * outer(inputs["A_scale"], inputs["B_scale"]))}


def integer_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (b.double() @ a.double().T).T.contiguous()


def outer(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.outer(rows.double(), columns.double())


def scaled_bound(expected: Expected) -> torch.Tensor:
    inside = expected.value.abs() * (ROUNDINGS * unit_roundoff(torch.float32))
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


SCALED = ErrorBound(scaled_bound, "one bf16 rounding, u = 2^-8, of an exact integer after 3 float32 roundings")

INT8_FAMILIES = (
    Family(
        name="int8_scaled_mm",
        op_type="gemm",
        twin={"n": 48, "k": 2080},
        plan=PLAN,
        make_inputs=make_inputs,
        isolated=("A_scale",),
        oracle=oracle,
        compare={"C": SCALED},
        kernels=(calling("sgl_kernel.int8_scaled_mm", SCALED_ARGUMENTS, limits=ROWS),),
    ),
)

GROUP = 128
#: Results are float16: no kind may come near its largest number.
QSERVE_FACTORS = {"large": 8.0, "tiny": 0.05, "huge": 16.0, "minute": 0.01, "positive": 0.05, "largest": 0.05}
#: Factors of the scales of tokens and of channels, one of them subnormal in float16; for corners on a CPU. There the
#: sums of activations are not those of the codes: they are a separate input.
FAINT = {"faint_a": (1e-3, 100.0), "faint_w": (100.0, 1e-3)}
#: Exponents of the factors between spread scales of tokens and of channels: as far as float16 results can go.
SPREAD = -6, 2
#: Deviations of weights (uniform 0..15) and of activations.
TYPICAL = 1 / (8 * 32)
#: float32 roundings of each of the two terms and of their difference.
QSERVE_ROUNDINGS = 5

#: Those of int8; on a CPU, also scales that are subnormal.
QSERVE_PLAN = replace(PLAN, on_cpu=[{"values": kind} for kind in FAINT])


def reordered(values: torch.Tensor) -> torch.Tensor:
    """[groups, n] with channel 8 i + j of each 32 moved to position 4 j + i."""
    groups, n = values.shape
    return values.view(groups, n // 32, 4, 8).transpose(2, 3).reshape(groups, n)


def halves(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16)


def activations(definition: Definition, plan: Plan, draws: Draws) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, k, kind = definition.const_axes["n"], definition.const_axes["k"], plan["values"]
    a = codes(draws, [plan["m"], k], kind)
    of_a, of_w = FAINT.get(kind, (QSERVE_FACTORS.get(kind, 1.0), 1.0))
    spread = SPREAD if kind == "spread" else (0, 0)
    of_rows = varied(draws, plan["m"], of_a * 0.02, spread)
    return a, halves(of_rows), halves(varied(draws, n, of_w * TYPICAL * 50 * k**-0.5, spread))


def packed_weights(definition: Definition, draws: Draws) -> torch.Tensor:
    """Uniform weights 0..15 are uniform bytes, in any order."""
    shape = [definition.const_axes["n"], definition.const_axes["k_bytes"]]
    return draws.integers(shape, -128, 127, torch.int8)


def inputs_per_channel(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Zero points are 0..15, and the sums of the activations are those of the codes, rounded as a quantizer does."""
    a, a_scales, w_scales = activations(definition, plan, draws)
    zero_points = draws.integers([definition.const_axes["n"]], 0, 15)
    sums = a.float().sum(dim=1)
    if plan["values"] in FAINT:
        sums = draws.normal(sums.shape, scale=float(sums.square().mean().sqrt()))
    return {
        "A": a,
        "B": packed_weights(definition, draws),
        "w_scales": w_scales,
        "a_scales": a_scales,
        "w_szeros": halves(zero_points * w_scales.float()),
        "a_sums": halves(sums * a_scales.float()),
    }


def inputs_per_group(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Group scales are 1..15. Zero points are 7 or 8 where a scale is above 8: all weights then fit 8 bits."""
    a, a_scales, w_scales = activations(definition, plan, draws)
    shape = [definition.const_axes["num_groups"], definition.const_axes["n"]]
    scales, points, middle = (draws.integers(shape, *limits) for limits in ((1, 15), (0, 15), (7, 8)))
    points = torch.where(scales > 8, middle, points)
    return {
        "A": a,
        "B": packed_weights(definition, draws),
        "zeros": reordered(-points * scales).to(torch.int8),
        "scales": reordered(scales).to(torch.int8),
        "w_scales": halves(w_scales.float() / 8),
        "a_scales": a_scales,
    }


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    n, k = packed.shape[0], 2 * packed.shape[1]
    index = torch.arange(512, device=packed.device)
    f, b, d, e, c = index % 4, index // 4 % 2, index // 8 % 2, index // 16 % 4, index // 64
    place = (8 * b + c) * 32 + 16 * d + 4 * e + f
    bytes_ = packed.view(torch.uint8).reshape(-1, 512)
    tiles = torch.zeros(len(bytes_), 1024, dtype=torch.uint8, device=packed.device)
    tiles[:, place], tiles[:, place + 16 * 32] = bytes_ % 16, bytes_ // 16
    return tiles.view(n // 32, k // 32, 32, 32).transpose(1, 2).reshape(n, k).double()


def original_order(stored: torch.Tensor) -> torch.Tensor:
    """Values of channels, [groups, n] in QServe's order -> in their own order, float64: the inverse of `reordered`."""
    position = torch.arange(stored.shape[1], device=stored.device)
    inside = position % 32
    return stored[:, position - inside + inside % 8 * 4 + inside // 8].double()


def oracle_per_channel(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Both terms in float64: exact integers times the outer product of the scales."""
    scale = outer(inputs["a_scales"], inputs["w_scales"])
    product = integer_product(inputs["A"], unpacked(inputs["B"])) * scale
    zeros = outer(inputs["a_sums"], inputs["w_szeros"])
    return {"C": Expected(product - zeros, {"magnitude": product.abs() + zeros.abs()})}


def oracle_per_group(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The product in float64: exact integers times the outer product of the scales."""
    scales, zeros = (original_order(inputs[name]).T.repeat_interleave(GROUP, dim=1) for name in ("scales", "zeros"))
    weights = unpacked(inputs["B"]) * scales + zeros
    product = integer_product(inputs["A"], weights) * outer(inputs["a_scales"], inputs["w_scales"])
    return {"C": Expected(product, {"magnitude": product.abs()})}


def result_bound(expected: Expected) -> torch.Tensor:
    inside = expected.parts["magnitude"] * (QSERVE_ROUNDINGS * unit_roundoff(torch.float32))
    return rounding_error(expected.value, torch.float16) * (1 + 2**-10) + inside


RESULT = ErrorBound(result_bound, "one float16 rounding, u = 2^-11, of exact integers after 5 float32 roundings")

QSERVE = "sgl_kernel.qserve_w4a8_per"
QSERVE_FAMILIES = (
    Family(
        name="qserve_w4a8_per_chn_gemm",
        op_type="gemm",
        twin={"n": 64, "k": 96, "k_bytes": 48},
        plan=QSERVE_PLAN,
        make_inputs=inputs_per_channel,
        oracle=oracle_per_channel,
        compare={"C": RESULT},
        kernels=(
            calling("sgl_kernel.qserve_w4a8_per_chn_gemm", "A B w_scales a_scales w_szeros a_sums C", limits=ROWS),
        ),
    ),
    Family(
        name="qserve_w4a8_per_group_gemm",
        op_type="gemm",
        twin={"n": 64, "k": 384, "k_bytes": 192, "num_groups": 3},
        plan=QSERVE_PLAN,
        make_inputs=inputs_per_group,
        oracle=oracle_per_group,
        compare={"C": RESULT},
        kernels=(
            calling("sgl_kernel.qserve_w4a8_per_group_gemm", "A B zeros scales w_scales a_scales C", limits=ROWS),
        ),
    ),
)
FAMILIES = (*INT8_FAMILIES, *QSERVE_FAMILIES)
