"""How outputs of attention are compared: bounds for the float32 references, and for the kernels' roundings.

All kernels take logits from float32 accumulators, scale them by float32(sm_scale * log2 e), and go through the keys in
tiles with a running maximum m: p = ex2.approx(s c - m c), of relative error 2^-22. According to
their source (flashinfer 0.7.2, include/flashinfer/attention), they also round as follows:

- decode on CUDA cores (decode.cuh) multiplies the values by float32 weights and sums these;
- fa2 (prefill.cuh, compute_sfm_v) multiplies by weights rounded to bf16, and sums the *rounded* ones into the
  denominator d (m16k16_rowsum_f16f16f32), so its lse = m + log2(d) inherits up to log2(1 + 2^-8) = 5.6e-3;
- fa3 (hopper/attention_updater.cuh) multiplies by rounded weights, but sums them before they are rounded;
- decode and fa2 split long requests where the GPU is not full, and keep partial outputs in bf16; merging rounds sums of
  groups of them once more (cascade.cuh, threadblock_sync_state). fa3 does not split;
- the two kernels of latent attention (mla.cuh, mla_hopper.cuh) differ as fa2 and fa3 do in the sum of the weights: fa2
  sums the rounded ones (compute_mla_pv), fa3 sums before convert_s_to_p. Both split the keys of long requests where the
  GPU is not full, keep partial outputs in bf16 (MLAParams: partial_o has the output's type), and merge them in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    Policy,
    host_figures,
    magnitude_of,
    rounding_error,
    summation_error,
    unit_roundoff,
)

LOG2_E = math.log2(math.e)
#: The loss in kernels that flush numbers below 2^-126 to 0: weights with the products of their values, and the result,
#: which they may rescale after each tile of 16 keys or more.
FLUSHED = "flushed"
SMALLEST = 2.0**-126
BFLOAT16 = unit_roundoff(torch.bfloat16)
FLOAT32 = unit_roundoff(torch.float32)
#: Covers the higher orders of errors up to 2^-8; bounds contain the first order.
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
    """Relative error of a kernel's weights that a whole tile of keys shares. m c is rounded before it is subtracted,
    u32 |m c| at each change of m, and m c differs from the lse by at most log2(length); ex2.approx, lg2.approx and
    rcp.approx are within 2^-22 = 4 u32; merging split keys repeats all of it."""
    return expected.parts["lse"].abs().add_(16).mul_(8 * FLOAT32)


def rounded_sum(expected: Expected) -> torch.Tensor:
    """Relative error of the sum of weights whose errors are independent, at most 1, and 0 for the largest weight."""
    return expected.parts["squared_others"].sqrt().mul_(CONFIDENCE).minimum(expected.parts["others"])


OUTPUT = ErrorBound(
    output_bound,
    "one bf16 rounding, u = 2^-8, of a float32 result: 8 sqrt(n) 2^-24 sum p|v| for the sum of p v; errors of the "
    "logits, 8 sqrt(d) 2^-24 sm_scale |q||k|, which pass through the softmax in quadrature",
)
LSE = ErrorBound(
    lse_bound,
    "float32 errors of the logits, 8 sqrt(d) 2^-24 sm_scale |q||k|, weighted by p in quadrature; 8 sqrt(n) "
    "2^-24 for the sum of n weights; roundings of the lse itself",
)
#: Reasons by how often partial outputs are rounded.
PARTIAL = {
    1: "partial outputs of split keys are rounded to bf16",
    2: "partial outputs of chunks of 128 or more keys are rounded to bf16, and groups of them once more",
}


@dataclass(frozen=True)
class Rounding:
    """The values that a kernel rounds to bf16, other than its output.

    Attributes:
        weights: whether it rounds the weights before the product with the values.
        sum: whether it also rounds the weights before it sums them.
        partial: how often it rounds the outputs of split keys: once when it stores them, once more if it merges groups.
    """

    weights: bool
    sum: bool
    partial: int

    @property
    def times(self) -> dict[str, int]:
        """How often each of `ROUNDED` is rounded."""
        return {"weights": int(self.weights), "partial": self.partial, "output": 1}


def kernel_output_bound(rounding: Rounding) -> Callable[[Expected], torch.Tensor]:
    """Bound on a kernel's output."""

    def bound(expected: Expected) -> torch.Tensor:
        total = expected.once(shared_bound)
        for name in ("weights", "partial"):
            if rounding.times[name]:
                total = total.add(expected.parts[name], alpha=rounding.times[name] * BFLOAT16 * HIGHER_ORDERS)
        if rounding.sum:
            size, denominator = expected.once(magnitude_of), expected.once(rounded_sum)
            total = total.addcmul(size, denominator, value=BFLOAT16 * HIGHER_ORDERS)
        return total

    return bound


def shared_bound(expected: Expected) -> torch.Tensor:
    """The part of a kernel's bound that does not depend on its roundings."""
    size = expected.parts["weighted"] + expected.once(magnitude_of)
    return torch.addcmul(expected.once(output_bound), expected.once(exponent_error), size).add_(expected.parts[FLUSHED])


def kernel_lse_bound(rounding: Rounding) -> Callable[[Expected], torch.Tensor]:
    """Bound on a kernel's lse."""

    def bound(expected: Expected) -> torch.Tensor:
        shared = expected.once(shared_lse_bound)
        if not rounding.sum:
            return shared
        return shared.add(expected.once(rounded_sum), alpha=LOG2_E * BFLOAT16 * HIGHER_ORDERS)

    return bound


def shared_lse_bound(expected: Expected) -> torch.Tensor:
    """The part of a kernel's bound on the lse that does not depend on its roundings."""
    return expected.once(lse_bound).add(expected.once(exponent_error), alpha=LOG2_E)


def gain_figures(expected: Expected) -> dict[str, float]:
    """The oracle's sums for the gain, without their prefix, and the largest ``exponent_error``."""
    sums = {name.removeprefix("gain_"): total for name, total in expected.parts.items() if name.startswith("gain_")}
    sums["exponent_error"] = expected.once(exponent_error).max()
    return dict(zip(sums, host_figures(*sums.values()), strict=True))


def gain_limit(rounding: Rounding) -> Callable[[Expected], float]:
    """Bound on a kernel's gain, |<actual, o> / <o, o> - 1|: where keys cancel, only the average shows a wrong scale.
    Roundings to bf16 add up to at most the sum of their projections; without a dominating key they are independent, and
    add up to 8 times the root of the sum of squares. Heads that share keys may round alike: those of a query are
    one."""

    def limit(expected: Expected) -> float:
        gain = expected.once(gain_figures)
        settled, worst, squares = (
            sum(times * gain[f"{kind}_{name}"] for name, times in rounding.times.items())
            for kind in ("settled", "worst", "squares")
        )
        independent = min(worst, CONFIDENCE * math.sqrt(squares * expected.value.shape[1]))
        rounded = BFLOAT16 * (settled + independent) * HIGHER_ORDERS
        shared = gain["exponent_error"] * gain["keys"]
        return (rounded + math.sqrt(gain["logit"]) + shared) / gain["size"] + 64 * FLOAT32

    return limit


def kernel_policies(rounding: Rounding) -> dict[str, Policy]:
    """Policies of a kernel that rounds so."""
    output, lse = ["the reference's bound"], ["the reference's bound"]
    if rounding.weights:
        output.append("all weights but the largest are rounded to bf16: 2^-8 min(sum p|v|, 8 sqrt(sum p^2 v^2))")
    if rounding.sum:
        output.append("the denominator sums the rounded weights")
        lse.append(
            "weights are rounded to bf16 before they are summed: log2(e) 2^-8 min(1 - p_max, 8 sqrt(sum p^2 - p_max^2))"
        )
    else:
        lse.append("weights are summed in float32")
    if rounding.partial:
        output.append(PARTIAL[rounding.partial])
    for reasons in (output, lse):
        reasons.append("ex2.approx and the product m c add 2^-24 (8 |lse| + 128)")
    output.append("weights and results below 2^-126 may be 0: their sum times max |v|; 2^-126 for each 16 keys")
    output.append("the gain is within the combined effect of these roundings")
    return {
        "output": ErrorBound(kernel_output_bound(rounding), "; ".join(output), gain_limit(rounding)),
        "lse": ErrorBound(kernel_lse_bound(rounding), "; ".join(lse)),
    }
