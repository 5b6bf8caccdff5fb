"""Bounds on float32 attention that all families share, computed from the parts that the oracles return.

u16 = 2^-8 and u32 = 2^-24 are the unit roundoffs of bf16 and float32.
"""

from __future__ import annotations

import math

import torch

from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    Expected,
    magnitude_of,
    rounding_error,
    summation_error,
    unit_roundoff,
)

LOG2_E = math.log2(math.e)
BFLOAT16 = unit_roundoff(torch.bfloat16)
FLOAT32 = unit_roundoff(torch.float32)
#: Covers the higher orders of errors up to 2^-8, of which bounds contain the first order.
HIGHER_ORDERS = 1 + 2**-6


def output_bound(expected: Expected) -> torch.Tensor:
    """Bound on one bf16 rounding of a float32 result, with errors of the logits and of the sum of weighted values."""
    parts = expected.parts
    inside = summation_error(parts["weighted"], parts["length"]).add_(parts["logit"])
    inside.add_(expected.once(magnitude_of), alpha=8 * FLOAT32)
    return inside.add_(rounding_error(expected.value, torch.bfloat16), alpha=1 + 2**-8)


def lse_bound(expected: Expected) -> torch.Tensor:
    """Bound on a base-2 lse in float32: errors of the logits and of the sum of weights, roundings of the lse itself."""
    parts = expected.parts
    total = summation_error(torch.ones_like(parts["length"]), parts["length"]).add_(parts["lse_logit"]).mul_(LOG2_E)
    return total.add_(parts["lse"].abs(), alpha=4 * FLOAT32).add_(32 * FLOAT32)


def exponent_error(expected: Expected) -> torch.Tensor:
    """Relative error of a kernel's weights that a whole tile of keys shares.

    m c is rounded before it is subtracted, u32 |m c| at each change of m, and m c differs from the lse by at most
    log2(length); ex2.approx, lg2.approx and rcp.approx are within 2^-22 = 4 u32; merging split keys repeats all of it.
    """
    return expected.parts["lse"].abs().add_(16).mul_(8 * FLOAT32)


def rounded_sum(expected: Expected) -> torch.Tensor:
    """Relative error of the sum of weights whose errors are independent, at most 1, and 0 for the largest weight."""
    return expected.parts["squared_others"].sqrt().mul_(CONFIDENCE).minimum(expected.parts["others"])
