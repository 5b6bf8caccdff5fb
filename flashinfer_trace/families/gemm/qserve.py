"""QServe's linear layers: 4-bit weights, in one or two levels of scales, and int8 activations."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.gemm import int8_scaled
from flashinfer_trace.families.gemm.int8_scaled import codes, integer_product, outer, varied
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, unit_roundoff

GROUP = 128
#: Results are float16: no kind may come near its largest number.
FACTORS = {"large": 8.0, "tiny": 0.05, "huge": 16.0, "minute": 0.01, "positive": 0.05, "largest": 0.05}
#: Factors of the scales of tokens and of channels, of which one is subnormal in float16; for corners on a CPU. The sums
#: of activations are none of the codes there: they are an input of its own.
FAINT = {"faint_a": (1e-3, 100.0), "faint_w": (100.0, 1e-3)}
#: Exponents by which scales of tokens and of channels differ if they are spread: as far as float16 results can.
SPREAD = -6, 2
#: Deviations of weights (uniform 0..15) and of activations.
TYPICAL = 1 / (8 * 32)
#: float32 roundings of each of the two terms and of their difference.
ROUNDINGS = 5


#: Those of int8; on a CPU, also scales that are subnormal.
PLAN = replace(int8_scaled.PLAN, on_cpu=[{"values": kind} for kind in FAINT])


def reordered(values: torch.Tensor) -> torch.Tensor:
    """[groups, n] with channel 8 i + j of each 32 moved to position 4 j + i."""
    groups, n = values.shape
    return values.view(groups, n // 32, 4, 8).transpose(2, 3).reshape(groups, n)


def halves(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16)


def activations(definition: Definition, plan: Plan, draws: Draws) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, and float16 scales of tokens and of channels."""
    n, k, kind = definition.const_axes["n"], definition.const_axes["k"], plan["values"]
    a = codes(draws, [plan["m"], k], kind)
    of_a, of_w = FAINT.get(kind, (FACTORS.get(kind, 1.0), 1.0))
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
    """The weights [n, k] of packed bytes, float64: those of each byte are put where its index in its tile says.

    Row 16 a + 8 b + c and column 16 d + 4 e + f of a tile of 32 x 32 are in byte (c, e, d, b, f), half a.
    """
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
    inside = expected.parts["magnitude"] * (ROUNDINGS * unit_roundoff(torch.float32))
    return rounding_error(expected.value, torch.float16) * (1 + 2**-10) + inside


RESULT = ErrorBound(result_bound, "one float16 rounding, u = 2^-11, of exact integers after 5 float32 roundings")


def run_per_channel(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    names = ("A", "B", "w_scales", "a_scales", "w_szeros", "a_sums")
    sgl_kernel.qserve_w4a8_per_chn_gemm(*(inputs[name] for name in names), outputs["C"])
    return outputs


def run_per_group(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    names = ("A", "B", "zeros", "scales", "w_scales", "a_scales")
    sgl_kernel.qserve_w4a8_per_group_gemm(*(inputs[name] for name in names), outputs["C"])
    return outputs


FAMILIES = (
    Family(
        name="qserve_w4a8_per_chn_gemm",
        op_type="gemm",
        twin={"n": 64, "k": 96, "k_bytes": 48},
        plan=PLAN,
        make_inputs=inputs_per_channel,
        oracle=oracle_per_channel,
        compare={"C": RESULT},
        kernels=(Kernel("sgl_kernel.qserve_w4a8_per_chn_gemm", run_per_channel, limits={"m": (1, 1 << 20)}),),
    ),
    Family(
        name="qserve_w4a8_per_group_gemm",
        op_type="gemm",
        twin={"n": 64, "k": 384, "k_bytes": 192, "num_groups": 3},
        plan=PLAN,
        make_inputs=inputs_per_group,
        oracle=oracle_per_group,
        compare={"C": RESULT},
        kernels=(Kernel("sgl_kernel.qserve_w4a8_per_group_gemm", run_per_group, limits={"m": (1, 1 << 20)}),),
    ),
)
