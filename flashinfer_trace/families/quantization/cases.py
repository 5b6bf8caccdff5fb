"""What the quantizers share: inputs, oracles and policies.

Codes are judged exactly, with one allowance: an implementation divides, or multiplies by a reciprocal, in float32.
Where the exact quotient is so close to a boundary between two codes that these roundings can move it across, both codes
pass. Where the scale is a power of two, none of them rounds, and one code passes. Kernels keep the allowance there:
their divisions and reciprocals may be approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

E4M3_MAX = 448.0
INT8_MAX = 127.0
#: The smallest maximum by which the group quantizers scale.
SMALLEST_MAXIMUM = 1e-10
#: float32 roundings of a quotient: the scale, its reciprocal (each up to 2 ulp if approximate) and the product.
ROUNDINGS = 8
QUOTIENT_ERROR = ROUNDINGS * unit_roundoff(torch.float32)

#: Of corners only: integers up to HALVES, whose int8 scale is 2, so that odd ones are halves; and values of standard
#: deviation VAST, whose products with 127 or 448 are beyond float32. By maxima beyond 2^126, which these do not reach,
#: sgl-kernel's approximate division gives 0 (findings/kernels.json).
HALVES, VAST = 254, 2.0**121
#: ``powers``: maxima of 1.75, whose e4m3 scale is a power of two; ``outliers``: one feature is 1000 times as large as
#: the rest, which get small codes; ``vanishing``: below 1e-10.
KINDS = (*VALUE_KINDS, "powers", "outliers", "vanishing")


@dataclass(frozen=True)
class Rows:
    """Which tokens a kernel takes. Attributes: zeros: tokens of zeros."""

    zeros: bool = True


def corners(request: PlanRequest) -> list[Plan]:
    """Values at the ends of float16's and float32's ranges, ties, a vanishing maximum, and a row of zeros among others.

    For int8 codes also halves that are exact.
    """
    kinds = ("vanishing", "powers", "huge", "minute", "outliers", "integers", "vast")
    halves = ("halves",) if request.definition.outputs["codes"].dtype == "int8" else ()
    zeros = request.options_of(Rows).zeros
    return [{"values": kind, "zero_row": zeros and kind == "outliers"} for kind in (*kinds, *halves)]


PLAN = RowPlans(
    {"num_tokens": Count(40, 4096)},
    {"values": KINDS, "zero_row": lambda request: FLAG if request.options_of(Rows).zeros else (False,)},
    special=corners,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """bfloat16 activations of the planned kind; optionally one row of zeros."""
    shape = [plan["num_tokens"], definition.const_axes["hidden_size"]]
    kind = plan["values"]
    if kind == "outliers":
        x = draws.normal(shape, torch.bfloat16)
        x[:, shape[1] // 3] *= 1000
    elif kind == "powers":
        x = draws.integers(shape, -4, 4).float().mul_(0.4375).to(torch.bfloat16)
    elif kind == "halves":
        x = draws.integers(shape, -HALVES, HALVES).to(torch.bfloat16)
        x[:, :: definition.const_axes.get("group_size", shape[1])] = HALVES
    elif kind == "vast":
        x = draws.normal(shape, torch.bfloat16, VAST)
    elif kind == "vanishing":
        x = draws.normal(shape, torch.bfloat16, 1e-11)
    else:
        x = draws.values(shape, torch.bfloat16, kind)
    if plan["zero_row"]:
        x[plan["num_tokens"] // 2 :][:1] = 0
    return {"x": x}


#: Part of expected codes: whether the scale of each element is a power of two, so that a quotient by it is exact.
EXACT = "exact"
#: The end of a reason for codes that are exact there.
UNLESS_EXACT = ", unless the scale is a power of two"
#: float64 values -> codes as float64.
Rounding = Callable[[torch.Tensor], torch.Tensor]


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float64 values rounded to the nearest e4m3 number, ties to even, as float64; at most 448."""
    exponent = (torch.frexp(values.abs().clamp_min(2.0**-6)).exponent - 1).double()
    spacing = torch.exp2(exponent - 3)
    return ((values / spacing).round() * spacing).clamp(-E4M3_MAX, E4M3_MAX)


def code_limits(rounded: Rounding, expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of quotients that are QUOTIENT_ERROR smaller and larger than the exact one; its own where `EXACT`."""
    error: torch.Tensor | float = QUOTIENT_ERROR
    if EXACT in expected.parts:
        error = expected.value.new_tensor(QUOTIENT_ERROR).where(~expected.parts[EXACT], 0.0)
    nearer, farther = (rounded(expected.value * factor) for factor in (1 - error, 1 + error))
    return torch.minimum(nearer, farther), torch.maximum(nearer, farther)


def e4m3_limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    return code_limits(nearest_e4m3, expected)


def exact_e4m3_limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    code = nearest_e4m3(expected.value)
    return code, code


def int8_limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    return code_limits(lambda values: values.trunc().clamp(-INT8_MAX, INT8_MAX), expected)


def scale_bound(expected: Expected) -> torch.Tensor:
    return expected.value.abs() * (2 * unit_roundoff(torch.float32))


CODES_E4M3 = Interval(
    e4m3_limits,
    f"the nearest e4m3 code; its neighbor too where 8 float32 roundings move the quotient past a tie{UNLESS_EXACT}",
    codes=True,
)
CODES_OF_POWERS = Interval(exact_e4m3_limits, "the nearest e4m3 code: a power of two divides exactly", codes=True)
CODES_INT8 = Interval(
    int8_limits,
    f"the quotient without its fraction; the next code too where 8 float32 roundings reach an integer{UNLESS_EXACT}",
    codes=True,
)


def of_kernels(codes: Interval) -> Interval:
    """The policy of codes for kernels, of which no quotient is known to be exact."""

    def limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
        parts = {name: part for name, part in expected.parts.items() if name != EXACT}
        return codes.limits(replace(expected, parts=parts))

    return replace(codes, limits=limits, reason=codes.reason.removesuffix(UNLESS_EXACT))


SCALES = ErrorBound(scale_bound, "a float32 quotient of an exact maximum: two roundings, u = 2^-24")


def quantized(x: torch.Tensor, group: int, largest_code: float, smallest: float) -> dict[str, Expected]:
    """The exact quotients and scales, float64, of groups of `group` features of x [num_tokens, hidden_size]."""
    values = x.double().reshape(len(x), x.shape[1] // group, group)
    largest = torch.maximum(values.amax(dim=2), -values.amin(dim=2)).clamp_min(smallest)
    scales = largest / largest_code
    quotients = torch.where(scales[:, :, None] > 0, values * largest_code / largest[:, :, None], 0.0)
    exact = (torch.frexp(scales).mantissa == 0.5).repeat_interleave(group, dim=1)
    return {"codes": Expected(quotients.flatten(1), {EXACT: exact}), "scales": Expected(scales)}


def quantized_by_powers(x: torch.Tensor, group: int) -> dict[str, Expected]:
    """As `quantized`, where scales are powers of two in ue8m0, four in an int32: found by trying every exponent."""
    scales = quantized(x, group, E4M3_MAX, SMALLEST_MAXIMUM)["scales"].value
    powers = torch.exp2(torch.arange(-127, 128, dtype=torch.float64, device=x.device))
    stored = torch.searchsorted(powers, scales)
    quotients = x.double().reshape(*scales.shape, group) / powers[stored].unsqueeze(2)
    each = stored.view(len(x), scales.shape[1] // 4, 4).to(torch.uint8)
    return {"codes": Expected(quotients.view(x.shape)), "scales": Expected(each.view(torch.int32).squeeze(2))}
