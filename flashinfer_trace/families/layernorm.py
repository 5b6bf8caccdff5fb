"""LayerNorm with scale and bias, with an epsilon of 1e-6 or of 1e-5."""

from __future__ import annotations

import functools
import math

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.rmsnorm import LARGEST_SUM, weights
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

U = unit_roundoff(torch.float32)

#: Half of five (three in each squared deviation, the division by n, and the addition of eps), four for rsqrt (2 ulp, 4
#: u), and three for a deviation and two products.
ROUNDINGS = 5 / 2 + 4 + 3

#: Standard deviation of the offsets of whole rows, which can make means many times as large as deviations.
OFFSETS = (0.0, 0.0, 30.0)

#: Weights and biases of corners. Every row of `raised` activations has a mean of RAISED, and float32 then loses the
#: variance in mean(x^2) - mean(x)^2; flashinfer's kernel sums squared deviations, so it has this corner too.
CORNER_WEIGHTS = {"huge": 1e5, "minute": 1e-6, "vast": 1.0, "raised": 1.0}
RAISED = 1000.0

PLAN = RowPlans(
    {"batch_size": Count(40, 4096)},
    {"values": VALUE_KINDS, "offset": OFFSETS},
    special=[{"values": values} for values in CORNER_WEIGHTS],
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Activations of the planned kind with an offset for each row; weights around 1, biases around 0, larger in
    corners. With `minute` activations, every other row is 1000 times smaller, so its variance is about EPS."""
    hidden_size, kind = definition.const_axes["hidden_size"], plan["values"]
    drawn = "normal" if kind in ("minute", "raised") else kind
    x = draws.values((plan["batch_size"], hidden_size), torch.bfloat16, drawn)
    if kind == "minute":
        x[1::2] *= 0.001
    factor = CORNER_WEIGHTS.get(kind, 1.0)
    offset = draws.normal([plan["batch_size"], 1], scale=plan["offset"]) + (RAISED if kind == "raised" else 0.0)
    return {
        "hidden_states": (x.float() + offset).to(torch.bfloat16),
        "weight": weights(hidden_size, kind, draws, CORNER_WEIGHTS),
        "bias": draws.normal([hidden_size], scale=0.25) * factor,
    }


def oracle(eps: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The norm in float64, from mean(x^2) - mean(x)^2: 16 of 53 bits cancel at a mean of 300 deviations, and what is
    lost of deviations far below sqrt(eps) is negligible."""
    x, weight, bias = (inputs[name].double() for name in ("hidden_states", "weight", "bias"))
    n = x.shape[-1]
    mean = torch.einsum("bi->b", x).div(n).unsqueeze(-1)
    variance = torch.einsum("bi,bi->b", x, x).div(n).unsqueeze(-1) - mean.square()
    variance = variance.masked_fill(variance * n > LARGEST_SUM, math.inf)
    deviation = torch.sqrt(variance.clamp_min(0.0) + eps)
    scaled = (x - mean) / deviation * weight
    parts = {
        "scaled": scaled.abs(),
        "weight": weight.abs(),
        "sum": torch.where(summed_exactly(x), 0.0, x.abs().mean(dim=-1, keepdim=True)) / deviation,
        "mean": mean.abs() / deviation,
        "length": torch.tensor(float(n), device=x.device),
    }
    return {"output": Expected(scaled + bias, parts)}


def summed_exactly(x: torch.Tensor) -> torch.Tensor:
    """Rows [rows, 1] whose float32 sums are exact in any order: their magnitudes add up to less than 2^24 steps."""
    # Eight significant bits: a bfloat16 is a multiple of its leading bit's value times 2^-7.
    step = torch.where(x != 0, torch.exp2(torch.frexp(x).exponent.double() - 8), torch.inf).amin(dim=-1, keepdim=True)
    return x.abs().sum(dim=-1, keepdim=True) / step < 2**24


def normalized_bound(expected: Expected) -> torch.Tensor:
    parts = expected.parts
    moved = summation_error(parts["sum"], parts["length"]) + parts["mean"] * 2 * U  # the division by n may be a product
    relative = (summation_error(torch.ones_like(moved), parts["length"]) + moved.square()) / 2 + ROUNDINGS * U
    inside = parts["weight"] * moved + parts["scaled"] * relative + expected.value.abs() * U
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


NORMALIZED = ErrorBound(
    normalized_bound,
    "one bf16 rounding, u = 2^-8, of a float32 value, with the error of its mean, half the error of its variance, and "
    "10 roundings",
)


def norm_family(suffix: str, eps: float) -> Family:
    return Family(
        name=f"layernorm{suffix}",
        op_type="layernorm",
        twin={"hidden_size": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=functools.partial(oracle, eps),
        compare={"output": NORMALIZED},
        isolated=("hidden_states",),  # its kernel takes no strided ones
        kernels=(
            # No kernel can be launched for zero rows, because an empty grid is an error in CUDA.
            calling(
                "flashinfer.norm.layernorm", f"hidden_states weight bias {eps}", limits={"batch_size": (1, 1 << 20)}
            ),
        ),
    )


FAMILIES = (norm_family("", 1e-6), norm_family("_eps1e5", 1e-5))
