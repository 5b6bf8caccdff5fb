"""The products of single experts in float64, and how far kernels that compute them may be off.

Errors of one element, with p its products: float32 sums lose 8 sqrt(k) u sum |p|. Hopper's tensor cores add fp8
products with 13 bits after the leading bit, and drop the rest: see `TRUNCATION_VARIANCE`. Where an activation lies
halfway between two codes, the oracle takes the number itself, and the code is off by half the distance between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from flashinfer_trace.families.gemm import positive_product
from flashinfer_trace.families.moe.experts import TRUNCATION_VARIANCE
from flashinfer_trace.families.moe.kernels import GAIN_CONFIDENCE
from flashinfer_trace.families.quantized import blocks_of, float_variance
from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    rounding_error,
    summation_error,
    unit_roundoff,
)

U32 = unit_roundoff(torch.float32)
#: Roundings of one term besides its sum: two scales, their product with a code, and the routing weight.
TERM_ROUNDINGS = 6
#: Dropped bits shrink a sum of products coherently: see TRUNCATION_GAIN of whole experts, which have three products.
PRODUCT_SHRINK = 2.0**-10
#: Quotients this close to halfway between two codes, relative to themselves, may round either way: x, its scale and a
#: reciprocal are rounded to float32 in between.
HALFWAY = 8 * U32
E4M3_MAX = 448.0

#: expert -> its weights in float64 [n, k].
Weights = Callable[[int], torch.Tensor]


def e4m3_groups(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [m, k] rounded to e4m3 in groups of BLOCK, float64, and half the distance of codes where x is halfway.

    The codes are computed from the exponents of the quotients, not by a conversion. A quotient that is halfway stays
    as it is.
    """
    groups = blocks_of(rows.double())
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / E4M3_MAX
    quotient = (groups / scales).clamp(-E4M3_MAX, E4M3_MAX)
    exponent = (torch.frexp(quotient.abs().clamp_min(2.0**-6)).exponent - 1).double()
    spacing = torch.exp2(exponent - 3)
    steps = quotient / spacing
    halfway = ((steps.abs() % 1) - 0.5).abs() <= HALFWAY * steps.abs()
    codes = torch.where(halfway, quotient, steps.round() * spacing)
    half = torch.where(halfway, spacing / 2, 0.0)
    return (codes * scales).flatten(1), (half * scales).flatten(1)


def products(
    rows: torch.Tensor,
    of_expert: Iterable[tuple[int, torch.Tensor, torch.Tensor]],
    weights: Weights,
    shape: tuple[int, int],
    spread: torch.Tensor | None = None,
    squared: bool = False,
) -> Expected:
    """rows times the weights of their experts; zero where nobody writes.

    Args:
        rows: float64 [m, k].
        of_expert: (expert, rows of the output, rows of `rows`), for experts with at least one.
        weights: the weights of one expert.
        shape: of the output.
        spread: how far each element of `rows` may be off, [m, k], or None.
        squared: whether a kernel truncates, so that its bound needs ``squares``.

    Returns:
        Parts ``magnitude``, the sum of |products|; ``squares``, that of their squares; ``spread``, that of |errors|.
        They are bounds: see `positive_product`.
    """
    value, magnitude, off, squares = (rows.new_zeros(shape) for _ in range(4))
    magnitudes = rows.abs().float()
    for expert, to, source in of_expert:
        own, x = weights(expert), magnitudes[source]
        value[to] = rows[source] @ own.T
        sizes = own.float().abs_()
        magnitude[to] = positive_product(x, sizes)
        if spread is not None:
            off[to] = positive_product(spread[source].float(), sizes)
        if squared:
            squares[to] = positive_product(x.square(), sizes.square_())
    parts = {"magnitude": magnitude, "spread": off, "length": torch.tensor(float(rows.shape[1]))}
    return Expected(value, {**parts, "squares": squares} if squared else parts)


def scaled(expected: Expected, factors: torch.Tensor) -> Expected:
    """The products times one factor a row."""
    size = factors.abs()
    of = {"magnitude": size, "spread": size, "squares": size.square()}
    parts = {name: part * of[name] if name in of else part for name, part in expected.parts.items()}
    return Expected(expected.value * factors, parts)


def reshaped(expected: Expected, shape: tuple[int, ...], exact: bool) -> Expected:
    """The same with another shape; ``exact`` if each sum is exact in float32."""
    parts = {name: part.view(shape) if part.ndim else part for name, part in expected.parts.items()}
    return Expected(expected.value.view(shape), parts, exact)


def float32_error(expected: Expected) -> torch.Tensor:
    """One rounding to bf16, float32 sums, and activations that are halfway between two codes.

    What is rounded is the sum with its errors: codes that are off may make it much larger than the expected value.
    """
    parts = expected.parts
    inside = summation_error(parts["magnitude"], int(parts["length"])) + TERM_ROUNDINGS * U32 * parts["magnitude"]
    off = inside + parts["spread"]
    return rounding_error(expected.value.abs() + off, torch.bfloat16) + off


def truncated_error(expected: Expected) -> torch.Tensor:
    return float32_error(expected) + CONFIDENCE * (expected.parts["squares"] * TRUNCATION_VARIANCE).sqrt()


def truncated_gain(expected: Expected) -> float:
    """What dropped bits may shrink, and 5 standard deviations of the average of independent errors of all elements."""
    parts, value = expected.parts, expected.value
    variance = parts["squares"] * TRUNCATION_VARIANCE + float_variance(value, torch.bfloat16) + parts["spread"].square()
    size = value.square().sum().clamp_min(1e-300)
    return PRODUCT_SHRINK + GAIN_CONFIDENCE * math.sqrt(float((variance * value.square()).sum() / size.square()))


PRODUCT = ErrorBound(
    float32_error,
    "one bf16 rounding, u = 2^-8, of a float32 sum: (8 sqrt(k) + 6) 2^-24 of the terms; exact for small integers",
)
QUANTIZED = ErrorBound(
    float32_error,
    "one bf16 rounding, u = 2^-8, of a float32 sum: (8 sqrt(k) + 6) 2^-24 of the terms; half the distance of codes for "
    "activations halfway between two",
)
TRUNCATED = ErrorBound(
    truncated_error,
    "as the reference, and 8 standard deviations of fp8 products that are added with 13 bits; for the scale of all "
    "elements, 2^-10 for dropped bits and 5 standard deviations",
    gain=truncated_gain,
)
