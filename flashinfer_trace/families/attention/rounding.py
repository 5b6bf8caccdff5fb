"""Bounds on float32 attention that all families share, computed from the parts that the oracles return.

u16 = 2^-8 and u32 = 2^-24 are the unit roundoffs of bf16 and float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from flashinfer_trace.harness.compare import CONFIDENCE, Expected, rounding_error, summation_error, unit_roundoff

LOG2_E = math.log2(math.e)
BFLOAT16 = unit_roundoff(torch.bfloat16)
FLOAT32 = unit_roundoff(torch.float32)
#: Covers the higher orders of errors up to 2^-8, of which bounds contain the first order.
HIGHER_ORDERS = 1 + 2**-6


def output_bound(expected: Expected) -> torch.Tensor:
    """Bound on one bf16 rounding of a float32 result, with errors of the logits and of the sum of weighted values."""
    parts = expected.parts
    inside = summation_error(parts["weighted"], parts["length"]) + parts["logit"] + 8 * FLOAT32 * expected.value.abs()
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


def lse_bound(expected: Expected) -> torch.Tensor:
    """Bound on a base-2 lse in float32: errors of the logits and of the sum of weights, roundings of the lse itself."""
    parts = expected.parts
    total = summation_error(torch.ones_like(parts["length"]), parts["length"])
    return LOG2_E * (parts["lse_logit"] + total) + FLOAT32 * (4 * parts["lse"].abs() + 32)


def exponent_error(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Relative error of a kernel's weights that a whole tile of keys shares.

    m c is rounded before it is subtracted, u32 |m c| at each change of m, and m c differs from the lse by at most
    log2(length); ex2.approx, lg2.approx and rcp.approx are within 2^-22 = 4 u32; merging split keys repeats all of it.
    """
    return FLOAT32 * (8 * parts["lse"].abs() + 128)


def rounded_sum(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Relative error of the sum of weights whose errors are independent, at most 1, and 0 for the largest weight."""
    return parts["others"].minimum(CONFIDENCE * parts["squared_others"].sqrt())
