"""The comparison policy of rows that are scaled to sum to 1 over the tokens that a threshold keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer_trace.families.sampling.support import TINY
from flashinfer_trace.verdict.compare import Comparison, Elementwise, Expected, host_figures, norm_error, wrong_shape


class Kept(NamedTuple):
    """What a window makes of the oracle's margins.

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
    """The row over the sum of what is kept."""
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

    `Expected.value` holds the exact result, [batch_size, vocab_size]; its parts ``margin`` and ``probs``, the same
    shape, ``scaled`` [batch_size, 1], whether the row is divided by its kept sum (a row of zeros is not), and, if that
    is not 1, ``otherwise`` [batch_size, 1], what it is divided by instead.

    Attributes:
        reason: one line for reports.
        relative: bound of the relative error of a kept value.
        window: margins of at most this size are undecidable.
    """

    reason: str
    relative: float
    window: float = 0.0

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        """See `Policy.compare`. The worst element is named only where the comparison fails."""
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
