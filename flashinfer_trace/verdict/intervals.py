"""A comparison policy for outputs whose errors are known to be one-sided, or whose codes may round either way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.compare import (
    Comparison,
    Elementwise,
    Expected,
    host_figures,
    norm_error,
    place,
    wrong_shape,
)
from flashinfer_trace.verdict.wrong_outputs import MUTANTS, ONE_PER_CENT_TOO_LARGE, Mutant

#: (what is expected) -> the smallest and the largest value of each element, float64.
Limits = Callable[[Expected], tuple[torch.Tensor, torch.Tensor]]
#: (what is expected) -> the smallest and the largest gain, <actual, expected> / <expected, expected> - 1.
GainLimits = Callable[[Expected], tuple[float, float]]


@dataclass(frozen=True)
class Interval(Elementwise):
    """Every element must lie between two limits derived from the oracle. The exact value need not be in the middle.

    The ratio that is reported is the distance from the middle over half the width.

    Attributes:
        limits: maps `Expected` to the limits of each element.
        reason: one line for reports and docs/accuracy.md.
        gain: if given, maps `Expected` to the limits of the gain, an average that shows a wrong scale.
        codes: whether the output holds codes of few bits, which a scale that is one per cent too large does not change.
    """

    limits: Limits
    reason: str
    gain: GainLimits | None = None
    codes: bool = False

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value = expected.value
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        if value.numel() == 0:
            return Comparison(0.0)
        low, high = expected.once(self.limits)
        computed = actual.double()
        middle, half = (low + high) / 2, (high - low) / 2
        distance = (computed - middle).abs()
        ratio = (distance / half).masked_fill_(distance == 0, 0.0)
        inside = (computed >= low) & (computed <= high)
        ratio = torch.where(inside, ratio.clamp(max=1.0), torch.where(ratio > 1, ratio, math.inf))
        worst = ratio.argmax()
        figures = [torch.take(each, worst) for each in (ratio, computed, value, half)]
        position, largest, got, wanted, limit = host_figures(worst, *figures)
        error = norm_error(computed, value)
        index = place(int(position), value.shape)
        if self.gain is not None and largest <= 1:
            found = self._gain_ratio(computed, expected)
            if found is not None and found[0] > largest:
                return Comparison(found[0], error, detail=found[1])
        return Comparison(largest, error, index, got, wanted, limit)

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        return tuple(mutant for mutant in MUTANTS if not (self.codes and mutant is ONE_PER_CENT_TOO_LARGE))

    def _gain_ratio(self, computed: torch.Tensor, expected: Expected) -> tuple[float, str] | None:
        """The gain's distance from the middle of its limits over half their width; None if nothing is expected."""
        assert self.gain is not None
        value = expected.value
        product, square = host_figures((computed * value).sum(), (value * value).sum())
        if square == 0:
            return None
        gain = product / square - 1
        low, high = expected.once(self.gain)
        middle, half = (low + high) / 2, (high - low) / 2
        ratio = abs(gain - middle) / half if half else (0.0 if gain == middle else math.inf)
        return ratio, f"gain is off by {gain:.2e}, limits {low:.2e} and {high:.2e}"
