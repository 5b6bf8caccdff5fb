"""How outputs of mla_paged are compared: bounds of the float32 reference and of flashinfer's two kernels.

u16 = 2^-8 and u32 = 2^-24 are the unit roundoffs of bf16 and float32. Both kernels (flashinfer 0.6.12) take logits
from tensor cores that accumulate in float32, scale them by float32(sm_scale * log2 e), and go through the keys in tiles
of 64 with a running maximum m: p = ex2.approx(s c - m c), of relative error 2^-22. They differ in what matters for lse:

- both multiply the values by p rounded to bf16;
- fa2 also sums the *rounded* p into the denominator d (mla.cuh, compute_mla_pv: m16k16_rowsum_f16f16f32 of p_f16), so
  that its lse = m + log2(d) inherits up to log2(1 + 2^-8) = 5.6e-3;
- fa3 sums p in float32 before it is rounded (mla_hopper.cuh: update_md_, then convert_s_to_p).

With keys enough to fill the GPU unevenly, both split a request's keys and store partial outputs in bf16 (MLAParams:
partial_o has the output's type): one more rounding of each partial output. Merging starts from m = -5e4, d = 1
(state.cuh), so a row without keys whose partial lse are all -inf comes out as -5e4; where nothing is merged, as -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from flashinfer_trace.families.attention.policies import LseOfNothing
from flashinfer_trace.families.attention.rounding import (
    BFLOAT16,
    FLOAT32,
    HIGHER_ORDERS,
    LOG2_E,
    exponent_error,
    lse_bound,
    output_bound,
    rounded_sum,
)
from flashinfer_trace.harness.compare import CONFIDENCE, ErrorBound, Expected

#: The lse of a row without keys after merging.
MERGED_FROM_NOTHING = (-5e4, -5e4)


def kernel_output_bound(rounds_sum: bool) -> Callable[[Expected], torch.Tensor]:
    """Bound of a kernel's output; `rounds_sum`: its denominator is the sum of rounded weights."""

    def bound(expected: Expected) -> torch.Tensor:
        parts, size = expected.parts, expected.value.abs()
        rounded = BFLOAT16 * (parts["weights"] + parts["chunks"])
        if rounds_sum:
            rounded = rounded + BFLOAT16 * size * rounded_sum(parts)
        shared = exponent_error(parts) * (parts["weighted"] + size)
        return output_bound(expected) + rounded * HIGHER_ORDERS + shared

    return bound


def kernel_lse_bound(rounds_sum: bool) -> Callable[[Expected], torch.Tensor]:
    """Bound of a kernel's lse; `rounds_sum` as above."""

    def bound(expected: Expected) -> torch.Tensor:
        parts = expected.parts
        rounded = BFLOAT16 * rounded_sum(parts) * HIGHER_ORDERS if rounds_sum else 0.0
        return lse_bound(expected) + LOG2_E * (rounded + exponent_error(parts))

    return bound


def gain_limit(expected: Expected) -> float:
    """Bound of a kernel's gain, |<actual, o> / <o, o> - 1|: where keys cancel, only the average shows a wrong scale.

    Roundings to bf16 (of the weights, of partial outputs, of the output) add up to at most the sum of their projections
    on the output; in rows without a dominating key they are independent, and add up in quadrature to 8 times the root
    of the sum of squares. The heads of a query round the same values and may do so alike: they count as one.
    """
    gain = {name.removeprefix("gain_"): float(v) for name, v in expected.parts.items() if name.startswith("gain_")}
    independent = min(gain["worst"], CONFIDENCE * math.sqrt(gain["squares"] * expected.value.shape[1]))
    rounded = BFLOAT16 * (gain["settled"] + independent) * HIGHER_ORDERS
    shared = float(exponent_error(expected.parts).max()) * gain["keys"]
    return (rounded + math.sqrt(gain["logit"]) + shared) / gain["size"] + 64 * FLOAT32


OUTPUT = ErrorBound(
    output_bound,
    "one bf16 rounding, u = 2^-8, of float32: PV sum 8 sqrt(n) 2^-24 sum p|v|; errors of the logits, 8 sqrt(576) 2^-24 "
    "sm_scale |q||k|, through the softmax in quadrature",
)
LSE = ErrorBound(
    lse_bound,
    "float32: errors of the logits, 8 sqrt(576) 2^-24 sm_scale |q||k|, weighted by p in quadrature; sum of n weights "
    "8 sqrt(n) 2^-24; roundings of the lse itself",
)


def kernel_policies(rounds_sum: bool) -> dict[str, ErrorBound | LseOfNothing]:
    """Policies of a flashinfer kernel: fa2 rounds the weights before it sums them (`rounds_sum`), fa3 after."""
    denominator = "and the denominator sums them rounded" if rounds_sum else "the denominator sums them in float32"
    lse = (
        "the reference's bound; weights are rounded to bf16 before they are summed: log2(e) 2^-8 min(1 - p_max, "
        "8 sqrt(sum p^2)) without the largest; ex2.approx and m c: 2^-24 (8 |lse| + 128)"
        if rounds_sum
        else "the reference's bound; weights are summed in float32; ex2.approx and m c: 2^-24 (8 |lse| + 128)"
    )
    return {
        "output": ErrorBound(
            kernel_output_bound(rounds_sum),
            "the reference's bound; weights but the largest rounded to bf16, 2^-8 min(sum p|v|, 8 sqrt(sum p^2 v^2)), "
            f"{denominator}; partial outputs of split keys rounded to bf16; ex2.approx and m c: 2^-24 (8 |lse| + 128); "
            "the gain within what these roundings can do together",
            gain_limit,
        ),
        "lse": LseOfNothing(ErrorBound(kernel_lse_bound(rounds_sum), lse), *MERGED_FROM_NOTHING),
    }
