"""Comparison policies for what is decided by a threshold on probability mass: sampled tokens, renormalised rows.

Which tokens a kernel keeps depends on sums that it rounds. The oracle therefore gives each token a *margin*: how far
the mass above it is from the limit, relative to the limit (see `signed_margin`). A token whose margin is beyond the
policy's window, which is derived from the number of roundings, is certainly kept or certainly not; within it either is
right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashinfer_trace.harness.compare import Comparison, Elementwise, Expected, host_figures, wrong_shape
from flashinfer_trace.harness.mutants import ANY_OUTPUT, Mutant

__all__ = ["ALPHA", "Distribution", "Renormalised", "chi_square_critical", "signed_margin"]

#: Probability that a right sampler fails one comparison. A full run makes about 4 x 10^3 of them (32 Definitions that
#: sample, 60 cases, reference and kernel): 4 x 10^-5 in all.
ALPHA = 1e-8

#: Smallest expected count of a bin. Pearson's statistic follows chi-square down to ALPHA only if no bin is far from
#: normal: at 20 expected draws the Poisson tail of one bin stays below the chi-square tail beyond the critical value.
MIN_EXPECTED = 20.0

#: Bins of about equal mass. A wrong temperature moves mass steadily from one end of the order to the other: 16 bins see
#: over 95 % of what unbinned counts would, at half the degrees of freedom of 32.
MAX_BINS = 16

#: Tests of one comparison, each of which takes an equal part of alpha.
TESTS = 5

#: Two distributions closer than this in total variation are not told apart by the draws of one case.
DISTINCT = 0.1

#: Keeps quotients and logarithms of unused entries finite.
TINY = 1e-300


def signed_margin(above: torch.Tensor, limit: torch.Tensor, exact: torch.Tensor | None = None) -> torch.Tensor:
    """(limit - above) / limit: positive for tokens with less than `limit` mass above them, which are the kept ones.

    Args:
        above: mass strictly above each token, float64 [rows, vocab_size].
        limit: [rows, 1]; where it is not positive nothing is kept.
        exact: [rows, 1], rows whose sums every order of summation represents exactly: their margins are infinite.
    """
    margin = torch.where(limit > 0, (limit - above) / limit, -math.inf)
    if exact is not None:
        certain = torch.where(above < limit, math.inf, -math.inf)
        margin = torch.where(exact, certain, margin)
    return margin


@functools.cache
def chi_square_critical(degrees: int, alpha: float) -> float:
    """The value that chi-square of `degrees` degrees of freedom exceeds with probability `alpha`, by bisection."""
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    low, high = 0.0, 10.0 * degrees + 10.0 * math.log(1 / alpha)
    for _ in range(80):
        middle = (low + high) / 2
        tail = float(torch.special.gammaincc(half, torch.tensor(middle / 2, dtype=torch.float64)))
        low, high = (middle, high) if tail > alpha else (low, middle)
    return high


@dataclass(frozen=True)
class Distribution:
    """Sampled tokens, several draws of each of a few rows: exact support, then a binned chi-square test.

    No sample may lie outside the certain and undecidable tokens. The certain tokens of each row are binned in
    descending order of probability; Pearson's statistic of each row, and its sum over the rows, must stay below
    chi-square's critical values, and the mean logarithm of the bins' probabilities, which a temperature moves most,
    within Bernstein's bound. The count of each certain token, and the share of the undecidable ones, must stay within
    Chernoff's bound of the binomial tails. Each of the five tests takes a fifth of alpha.

    `Expected.value` holds the probabilities, float64 [rows, vocab_size]; its parts ``group`` [batch_size], the row that
    each sample was drawn from, ``margin`` [rows, vocab_size], and, unless it equals `value`, ``chance``
    [rows, vocab_size]: at most this often a token is drawn if a kernel keeps it.

    Power (measured in tests/harness/test_distribution.py): 2048 draws of a row reject a missing token of probability
    0.02, and a temperature of 1.1 on normal logits of standard deviation 2.5, with probability above 0.95; in a
    vocabulary of 64 tokens, where such a row has less entropy to lose, the temperature takes 8192 draws.

    Attributes:
        reason: one line for reports: what the window is made of.
        window: margins of at most this size are undecidable.
        alpha: probability that a right sampler fails.
    """

    reason: str
    window: float = 0.0
    alpha: float = ALPHA

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        group, margin = expected.parts["group"], expected.parts["margin"]
        if actual.shape != group.shape:
            return wrong_shape(actual, group)
        if group.numel() == 0:
            return Comparison(0.0)
        rows, vocab_size = expected.value.shape
        valid = (actual >= 0) & (actual < vocab_size)
        token = torch.where(valid, actual, 0).long()
        outside = torch.where(valid, margin[group, token], -math.inf) < -self.window
        if bool(outside.any()):
            return self._outside(actual, outside, group)
        support = expected.once(Support.of, self.window)
        flat = torch.where(support.certain[group, token], token, vocab_size) + group * (vocab_size + 1)
        count = torch.zeros(rows * (vocab_size + 1), dtype=torch.int64, device=token.device)
        count = count.scatter_add_(0, flat, torch.ones_like(flat)).view(rows, vocab_size + 1)
        stray, count = count[:, vocab_size], count[:, :vocab_size]
        tests = [self._thresholds(stray, support), self._tokens(count, support), *self._bins(count, support)]
        ratio, detail = max(tests, key=lambda test: test[0])
        return Comparison(ratio, detail=detail)

    def zero(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(expected.parts["group"], dtype=dtype)

    def passes_zero(self, expected: Expected, dtype: torch.dtype) -> bool:
        return self.compare(self.zero(expected, dtype), expected).passed

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        """Swaps and shifts only between distributions that the draws of one case tell apart."""
        value = expected.value
        wrong = list(ANY_OUTPUT)
        if len(value) > 1 and (value[0] - value[-1]).abs().sum() / 2 > DISTINCT:
            # All draws of the first and of the last row exchange places.
            wrong.append(Mutant("two rows swapped", lambda samples, _: samples.roll(len(samples) // len(value))))
        if len(value) and ((value - value.roll(1, dims=-1)).abs().sum(-1) / 2).max() > DISTINCT:
            wrong.append(Mutant("shifted by one", lambda samples, _: (samples + 1) % value.shape[-1]))
        return tuple(wrong)

    def _outside(self, actual: torch.Tensor, outside: torch.Tensor, group: torch.Tensor) -> Comparison:
        wrong = outside.nonzero().flatten()
        first = int(wrong[0])
        detail = f"{len(wrong)} of {len(outside)} samples are outside the support, first of row {int(group[first])}"
        return Comparison(math.inf, math.inf, (first,), float(actual[first]), detail=detail)

    def _thresholds(self, stray: torch.Tensor, support: Support) -> tuple[float, str]:
        """Undecidable samples of each row against their largest share."""
        draws, share = support.draws, support.undecided
        exponent = torch.where(stray > draws * share, binomial_exponent(stray, draws, share), 0.0)
        row = exponent.argmax()
        largest, number, samples = host_figures(torch.take(exponent, row), row, torch.take(stray, row))
        critical = math.log(TESTS * len(draws) / self.alpha)
        return largest / critical, f"row {int(number)}: {int(samples)} samples at the threshold"

    def _tokens(self, count: torch.Tensor, support: Support) -> tuple[float, str]:
        """The count of every certain token: a missing one shows here before it shows among others in its bin."""
        total = count.sum(dim=-1, keepdim=True)
        exponent = binomial_exponent(count, total, support.probability)
        worst = exponent.argmax()
        figures = [torch.take(each, worst) for each in (exponent, support.probability, total.expand_as(count), count)]
        position, largest, probability, samples, drawn = host_figures(worst, *figures)
        row, token = divmod(int(position), count.shape[1])
        critical = math.log(2 * TESTS * max(support.tokens, 1) / self.alpha)
        text = f"token {token} drawn {int(drawn)} times, expected {probability * samples:.1f}"
        return largest / critical, f"row {row}: {text}"

    def _bins(self, count: torch.Tensor, support: Support) -> Iterator[tuple[float, str]]:
        """Pearson's statistic of each row's certain tokens, and of all rows together; the temperature of all rows."""
        share, degrees = support.share, support.degrees
        observed = torch.zeros_like(share).scatter_add_(1, support.bins, count.double())
        mean = observed.sum(dim=-1, keepdim=True) * share
        terms = torch.where(share > 0, (observed - mean).square() / mean.clamp_min(TINY), 0.0)
        centre = (mean * support.score).sum(dim=-1, keepdim=True) / mean.sum(dim=-1, keepdim=True).clamp_min(TINY)
        centred = support.score - centre
        sums = [((observed - mean) * centred).sum(), (mean * centred.square()).sum(), centred.abs().max()]
        deviation, variance, largest, *statistic = host_figures(*sums, *terms.sum(dim=-1).unbind())
        yield self._temperature(deviation, variance, largest)
        alpha = self.alpha / TESTS / len(degrees)
        tested = [(f"row {row}", statistic[row], d, alpha) for row, d in enumerate(degrees) if d]
        if tested:
            pooled = sum(value for _, value, _, _ in tested)
            tested.append(("all rows", pooled, sum(degrees), self.alpha / TESTS))
        for who, value, d, alpha in tested:
            critical = chi_square_critical(d, alpha)
            yield value / critical, f"{who}: chi-square {value:.1f} of {d} degrees, critical {critical:.1f}"

    def _temperature(self, deviation: float, variance: float, largest: float) -> tuple[float, str]:
        """Sum of the scores of all samples against its mean: Bernstein's inequality of bounded independent terms."""
        exponent = deviation**2 / (2 * (variance + largest * abs(deviation) / 3)) if deviation else 0.0
        figures = f"{deviation:.1f}, standard deviation {math.sqrt(variance):.1f}"
        return exponent / math.log(2 * TESTS / self.alpha), f"all rows: sum of log-probabilities is off by {figures}"


@dataclass(frozen=True)
class Support:
    """What a window makes of the oracle's margins, and the bins of its certain tokens.

    Attributes:
        certain: tokens that are certainly kept and may be drawn, bool [rows, vocab_size].
        probability: of each certain token among them, [rows, vocab_size].
        tokens: how many certain ones there are.
        undecided: at most this share of a row's draws may be tokens that are neither certain nor certainly not kept;
            rounding may also let a draw fall through to a token at the threshold, hence the window in it.
        draws: of each row, int64 [rows].
        bins, share: see `descending_bins`.
        score: see `mean_logarithm`.
        degrees: of freedom of each row's bins.
    """

    certain: torch.Tensor
    probability: torch.Tensor
    tokens: int
    undecided: torch.Tensor
    draws: torch.Tensor
    bins: torch.Tensor
    share: torch.Tensor
    score: torch.Tensor
    degrees: list[int]

    @classmethod
    def of(cls, expected: Expected, window: float) -> Support:
        value, group, margin = expected.value, expected.parts["group"], expected.parts["margin"]
        certain = (margin > window) & (value > 0)
        undecided = (margin >= -window) & ~certain
        weight = torch.where(certain, value, 0.0)
        chance = expected.parts.get("chance", value)
        share_of_undecided = (torch.where(undecided, chance, 0.0).sum(dim=-1) + window).clamp(max=1.0)
        draws = torch.bincount(group, minlength=len(value))
        bins, share = descending_bins(weight, draws)
        probability = weight / weight.sum(dim=-1, keepdim=True).clamp_min(TINY)
        tokens, *used = [int(each) for each in host_figures((weight > 0).sum(), *(share > 0).sum(dim=-1).unbind())]
        return cls(
            certain,
            probability,
            tokens,
            share_of_undecided,
            draws,
            bins,
            share,
            mean_logarithm(weight, bins, share),
            [max(count - 1, 0) for count in used],
        )


def mean_logarithm(weight: torch.Tensor, bins: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mean logarithm of the probabilities in each bin, [rows, MAX_BINS], 0 for unused bins."""
    probability = weight / weight.sum(dim=-1, keepdim=True).clamp_min(TINY)
    terms = torch.where(weight > 0, probability * probability.clamp_min(TINY).log(), 0.0)
    return torch.zeros_like(share).scatter_add_(1, bins, terms) / torch.where(share > 0, share, 1.0)


def binomial_exponent(count: torch.Tensor, total: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """x such that exp(-x) bounds the binomial probability of a count this far from its mean or farther (Chernoff)."""
    p = probability.clamp(TINY, 1.0)
    q = count / total.clamp_min(1)
    more = torch.where(q > 0, q * torch.log(q / p), 0.0)
    less = torch.where(q < 1, (1 - q) * (torch.log1p(-q.clamp(max=1 - 1e-16)) - torch.log1p(-p).clamp_min(-700)), 0.0)
    return total * (more + less).clamp_min(0.0)


def descending_bins(weight: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bins of consecutive tokens in descending order of `weight`, each with at least MIN_EXPECTED expected draws.

    Args:
        weight: [rows, vocab_size], 0 for tokens that belong to no bin.
        draws: [rows].

    Returns:
        The bin of each token, int64 [rows, vocab_size], and the share of each bin, [rows, MAX_BINS], 0 for unused ones.
    """
    order = weight.argsort(dim=-1, descending=True, stable=True)
    total = weight.sum(dim=-1, keepdim=True).clamp_min(TINY)
    ordered = weight.gather(-1, order) / total
    begin = ordered.cumsum(dim=-1) - ordered
    fine = (begin * MAX_BINS).long().clamp(0, MAX_BINS - 1)
    mass = torch.zeros(len(weight), MAX_BINS, dtype=torch.float64, device=weight.device).scatter_add_(1, fine, ordered)
    merged = torch.tensor(
        [closed_bins(row, count) for row, count in zip(mass.tolist(), draws.tolist(), strict=True)],
        dtype=torch.int64,
    ).to(mass.device)
    share = torch.zeros_like(mass).scatter_add_(1, merged, mass)
    return torch.empty_like(order).scatter_(1, order, merged.gather(1, fine)), share


def closed_bins(mass: list[float], draws: int) -> list[int]:
    """The bin that each of MAX_BINS parts of a row joins: one is closed only when it is full.

    What is left over at the end joins the last full one.
    """
    merged, current, filled = [], 0, 0.0
    for part in mass:
        merged.append(current)
        filled += part
        if filled * draws >= MIN_EXPECTED:
            current, filled = current + 1, 0.0
    return [min(number, max(current - 1, 0)) for number in merged]


@dataclass(frozen=True)
class Renormalised(Elementwise):
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
        value, probs, margin = expected.value, expected.parts["probs"], expected.parts["margin"]
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        if value.numel() == 0:
            return Comparison(0.0)
        computed = actual.double()
        certain = margin > self.window
        undecided = (margin >= -self.window) & ~certain
        chosen = undecided & (computed > 0)
        smallest = torch.where(chosen, probs, math.inf).amin(dim=-1, keepdim=True)
        kept = certain | (undecided & (probs >= smallest))
        mass = torch.where(kept, probs, 0.0).sum(dim=-1, keepdim=True)
        otherwise = expected.parts.get("otherwise", torch.ones_like(mass))
        want = torch.where(kept, probs, 0.0) / torch.where(expected.parts["scaled"] & (mass > 0), mass, otherwise)
        error = (computed - want).abs()
        ratio = torch.where(error == 0, 0.0, error / (want * self.relative))
        ratio = torch.where(computed.isfinite(), ratio, math.inf)
        worst = ratio.argmax()
        norms = torch.where(computed.isfinite(), error, 0.0).norm(), want.norm()
        counts = chosen.sum(), undecided.sum(), certain.sum()
        figures = [torch.take(each, worst) for each in (ratio, computed, want)]
        position, finite, size, *found = host_figures(worst, *norms, *counts, *figures)
        kept_undecided, all_undecided, all_certain = (int(number) for number in found[:3])
        largest, got, wanted = found[3:]
        return Comparison(
            largest,
            finite / size if size else (0.0 if finite == 0 else math.inf),
            divmod(int(position), value.shape[1]),
            got,
            wanted,
            wanted * self.relative,
            f"{kept_undecided} of {all_undecided} undecidable tokens kept, {all_certain} certain",
        )
