"""Renormalization of probabilities by top-k and top-p.

It has an op_type of its own because flashinfer-bench judges every Definition of op_type sampling by the tokens that it
draws.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.sampling import FLOAT64, SUM, U, parameter_faults, row_family
from flashinfer_trace.families.sampling.distribution import TINY
from flashinfer_trace.families.sampling.oracles import renorm_oracle
from flashinfer_trace.families.sampling.rows import SamplingOptions, plan_for_axes, renorm_corners, renorm_plans
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.kernels.needs import LARGEST_HISTOGRAM
from flashinfer_trace.verdict.compare import Comparison, Elementwise, Expected, host_figures, norm_error, wrong_shape


class Kept(NamedTuple):
    """The tokens that a kernel keeps, by the oracle's margins and a window.

    Attributes:
        certain, undecided: tokens that must be kept, and those that may be, bool [batch_size, vocab_size].
        want: the exact result if no undecidable token is kept, float64 [batch_size, vocab_size].
        size: its Frobenius norm.
        certain_count, undecided_count: how many of them there are.
    """

    certain: torch.Tensor
    undecided: torch.Tensor
    want: torch.Tensor
    size: float
    certain_count: int
    undecided_count: int

    @classmethod
    def of(cls, expected: Expected, window: float) -> Kept:
        margin = expected.parts["margin"]
        certain = margin > window
        undecided = (margin >= -window) & ~certain
        want = scaled(expected, certain)
        counts = [each.sum(dtype=torch.float64) for each in (certain, undecided)]
        size, certain_count, undecided_count = host_figures(want.norm(), *counts)
        return cls(certain, undecided, want, size, int(certain_count), int(undecided_count))


def scaled(expected: Expected, keep: torch.Tensor) -> torch.Tensor:
    parts = expected.parts
    weight = parts["probs"] * keep
    mass = weight.sum(dim=-1, keepdim=True)
    otherwise = parts.get("otherwise", torch.ones_like(mass))
    return weight / torch.where(parts["scaled"] & (mass > 0), mass, otherwise)


@dataclass(frozen=True)
class Renormalized(Elementwise):
    """Rows scaled to sum to 1 over the tokens that a threshold keeps: exact support, then a relative error bound.

    Certain tokens must be kept, certain others 0. The undecidable ones that are kept must be the largest of them, and
    every kept value must be the input divided by the sum of what was kept.

    `Expected.value` holds the exact result, [batch_size, vocab_size]. Its parts ``margin`` and ``probs`` have the same
    shape. ``scaled`` [batch_size, 1] says whether the row is divided by its kept sum (a row of zeros is not).
    ``otherwise`` [batch_size, 1], by default 1, divides the rows without a kept sum and those not scaled by it.

    Attributes:
        reason: one line for reports.
        relative: bound of the relative error of a kept value.
        window: margins of at most this size are undecidable.
    """

    reason: str
    relative: float
    window: float = 0.0

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value = expected.value
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        if value.numel() == 0:
            return Comparison(0.0)
        kept, computed = expected.once(Kept.of, self.window), actual.double()
        want, chosen = kept.want, None
        if kept.undecided_count:
            chosen = kept.undecided & (computed > 0)
            smallest = expected.parts["probs"].masked_fill(~chosen, math.inf).amin(dim=-1, keepdim=True)
            want = scaled(expected, kept.certain | (kept.undecided & (expected.parts["probs"] >= smallest)))
        difference = computed - want
        distance = difference.norm()
        # The smallest divisor makes any error of what must be 0 too large.
        ratio = difference.abs_() / (want * self.relative).clamp_min(TINY)
        figures = [ratio.amax(), distance]
        if chosen is not None:
            figures += [want.norm(), chosen.sum(dtype=torch.float64)]
        largest, error, *others = host_figures(*figures)
        size, chosen_count = others or (kept.size, 0)
        counts = f"{int(chosen_count)} of {kept.undecided_count} undecidable tokens kept, {kept.certain_count} certain"
        if not (largest <= 1.0 and math.isfinite(error)):
            return self._failing(computed, want, counts)
        return Comparison(largest, error / size if size else 0.0, detail=counts)

    def passes_zero(self, expected: Expected, dtype: torch.dtype) -> bool:
        """Zeros keep no undecidable token, and lack every certain one."""
        return not expected.value.numel() or expected.once(Kept.of, self.window).size == 0

    def _failing(self, computed: torch.Tensor, want: torch.Tensor, counts: str) -> Comparison:
        """The comparison of an output with an element beyond its bound, infinite or NaN: the worst one is named."""
        error = (computed - want).abs()
        ratio = (
            (error / (want * self.relative)).masked_fill_(error == 0, 0.0).masked_fill_(~computed.isfinite(), math.inf)
        )
        worst = ratio.argmax()
        position, largest, got, wanted = host_figures(worst, *(each.take(worst) for each in (ratio, computed, want)))
        index = divmod(int(position), want.shape[1])
        return Comparison(largest, norm_error(computed, want), index, got, wanted, wanted * self.relative, counts)


REFERENCE_RENORM = Renormalized("one float32 rounding of a float64 quotient; float64 sums", U * (1 + 2**-20), FLOAT64)
RENORM_TOP_K = Renormalized("float32 sum of 300 roundings, approximate reciprocal, product; exact support", SUM + 4 * U)
RENORM_TOP_P = Renormalized(
    "float32 sum of 300 roundings, approximate reciprocal, product; threshold: two such sums",
    SUM + 4 * U,
    2 * SUM + 4 * U,
)
#: The default of flashinfer's top-p renormalization adds to the bins of a histogram with atomics: up to 163840 numbers
#: one after another in any order, whose partial sums average half the final one; once for the row, once for the mass.
RENORM_ATOMIC = Renormalized(
    "float32 sum of 300 roundings, approximate reciprocal, product; threshold: bins of up to 163840 serial additions",
    SUM + 4 * U,
    LARGEST_HISTOGRAM * U,
)


def renorm_family(name: str, parameter: str, kernels: tuple[Kernel, ...]) -> Family:
    return row_family(
        name=name,
        op_type="renorm",
        plan=OwnPlans(renorm_plans, plan_for_axes, renorm_corners),
        oracle=renorm_oracle,
        compare={"renorm_probs": REFERENCE_RENORM},
        kernels=kernels,
        faults=parameter_faults([parameter]),
    )


# sgl-kernel builds an older flashinfer. Its top-k keeps the largest value for k = 0 and returns the row unscaled for k
# beyond the vocabulary, negative, or beyond the number of positive values; its top-p takes p as absolute mass. On rows
# that sum to 1, with k > 0, both agree with the newer one.
SUMS_TO_ONE = SamplingOptions(sums_to_one=True)
WITH_TOKENS = dataclasses.replace(SUMS_TO_ONE, lowest_k=1)

# A defect of flashinfer 0.6.12; its own search below 2048 tokens and sgl-kernel do not have it. If the radix search of
# include/flashinfer/air_top_p.cuh does not reach its target, it leaves the loop over groups of 32 bins with the last
# group already added. It adds that group again and can stop at its first bin, which drops tokens that must be kept. It
# does not reach the target if p > 1; if p = 1 and its rounded parts add up to less than its rounded total; and if the
# limit is, up to rounding, the mass down to the last token of the bin that an earlier pass chose: p at or next to a
# cumulative mass. Measured on an H200: (0.5, 0.25, 0.125, ...) with p = 1.5 keeps 0.5 alone; Zipf rows with p = 1 lose
# their tail. Of 16384 rows with p at a cumulative mass that were made for the last two tokens within it to share a
# group, 7 % lose the last one, up to 0.21 of the kept mass, in either mode; of as many where it is alone in its group,
# or where p is 1 % of its mass lower, none does; of random rows, 0.04 %.
RADIX = SamplingOptions(highest_p=0.999, boundaries=False)

# The op itself: sgl_kernel's Python function calls flashinfer's instead where that is installed.
FLASHINFER, SGL = "flashinfer.sampling.top_{}_renorm_probs", "torch.ops.sgl_kernel.top_{}_renorm_probs"
K_RENORM, P_RENORM = "top_k_renorm_probs", "top_p_renorm_probs"
BY_K, BY_P, ATOMIC = ({"renorm_probs": policy} for policy in (RENORM_TOP_K, RENORM_TOP_P, RENORM_ATOMIC))
FAMILIES = (
    renorm_family(
        K_RENORM,
        "top_k",
        (
            calling(FLASHINFER.format("k"), "probs top_k", common=WITH_TOKENS, compare=BY_K),
            calling(SGL.format("k"), "probs renorm_probs top_k 0", plan_options=WITH_TOKENS, compare=BY_K),
        ),
    ),
    renorm_family(
        P_RENORM,
        "top_p",
        (
            calling(FLASHINFER.format("p"), "probs top_p", plan_options=RADIX, compare=ATOMIC),
            calling(
                FLASHINFER.format("p"),
                "probs top_p is_deterministic=True",
                "is_deterministic",
                plan_options=RADIX,
                compare=BY_P,
            ),
            calling(SGL.format("p"), "probs renorm_probs top_p 0", plan_options=SUMS_TO_ONE, compare=BY_P),
        ),
    ),
)
