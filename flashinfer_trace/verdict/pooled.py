"""Deviations that no one case shows, added up over all cases of a run: what a sampler draws too often or too evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashinfer_trace.verdict.compare import Comparison, Score

#: Probability that a right sampler fails one of the pooled tests of one run; each takes an equal part.
POOLED_ALPHA = 1e-8


def bernstein(deviation: float, variance: float, largest: float) -> float:
    """x such that 2 exp(-x) bounds the probability that a sum of independent terms of mean 0 is so far off, or farther.

    Args:
        deviation: the sum.
        variance: of the sum.
        largest: size that no term exceeds.
    """
    return deviation**2 / (2 * (variance + largest * abs(deviation) / 3)) if deviation else 0.0


@dataclass
class Pool:
    """The scores of all cases so far: by output and name, their sum, its variance, and the size of a term."""

    sums: dict[tuple[str, str], Score] = field(default_factory=dict)

    def add(self, comparisons: Mapping[str, Comparison]) -> None:
        """Adds the scores of one case."""
        for output, comparison in comparisons.items():
            for score in comparison.scores:
                known = self.sums.get((output, score.name))
                self.sums[output, score.name] = score if known is None else known + score

    def worst(self) -> tuple[str, Comparison] | None:
        """The output and the comparison of the score that is farthest off; None if there are none."""
        critical = math.log(2 * max(1, len(self.sums)) / POOLED_ALPHA)
        found = [(output, self._compared(score, critical)) for (output, _), score in self.sums.items()]
        return max(found, key=lambda each: each[1].ratio, default=None)

    def failure(self, who: str = "") -> str:
        """The line about a score that is too far off; empty if none is."""
        worst = self.worst()
        return "" if worst is None or worst[1].passed else f"{who}output {worst[0]}: {worst[1].detail}"

    @staticmethod
    def _compared(score: Score, critical: float) -> Comparison:
        deviation = min(score.deviation, 0.0) if score.low else score.deviation
        sigma = math.sqrt(score.variance)
        text = f"over all cases, {score.name} is off by {score.deviation:+.1f}, standard deviation {sigma:.1f}"
        return Comparison(bernstein(deviation, score.variance, score.largest) / critical, detail=text)
