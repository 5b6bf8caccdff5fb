"""The comparison policy of sampled tokens: exact support, and how often each token is drawn.

Which tokens a kernel keeps depends on sums that it rounds. The oracle therefore gives each token a *margin*: how far
the mass above it is from the limit, relative to the limit (see `oracles.signed_margin`). A token whose margin is beyond
the policy's window, which is derived from the number of roundings, is certainly kept or certainly not; within it either
is right.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashinfer_trace.families.sampling.support import MAX_BINS, TINY, Support, in_parts
from flashinfer_trace.verdict.compare import Comparison, Expected, Score, wrong_shape
from flashinfer_trace.verdict.pooled import bernstein
from flashinfer_trace.verdict.wrong_outputs import ANY_OUTPUT, Mutant

#: Probability that a right sampler fails one of TESTS tests of one comparison, each of which takes an equal part of it;
#: the test of the order of indices takes as large a part besides, so that a comparison has 1.2 x 10^-8. A full run
#: makes about 9 x 10^3 of them (65 Definitions that sample, 65 cases, reference and kernel): 10^-4 in all.
ALPHA = 1e-8
TESTS = 5

#: Two distributions closer than this in total variation are not told apart by the draws of one case.
DISTINCT = 0.1


@functools.cache
def chi_square_critical(degrees: int, alpha: float) -> float:
    """The value that chi-square of `degrees` degrees of freedom exceeds with probability `alpha`, by bisection."""
    low, high = 0.0, 10.0 * degrees + 10.0 * math.log(1 / alpha)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(degrees, middle) > alpha else (low, middle)
    return high


def chi_square_tail(degrees: int, value: float) -> float:
    """The probability that chi-square of `degrees` degrees of freedom exceeds a positive `value`.

    The sum of Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.4.4 and 26.4.5.
    """
    half = value / 2
    odd = degrees % 2
    tail = math.erfc(math.sqrt(half)) if odd else 0.0
    for number in range(degrees // 2):
        power = number + odd / 2
        tail += math.exp(power * math.log(half) - half - math.lgamma(power + 1))
    return tail


@dataclass(frozen=True)
class Distribution:
    """Sampled tokens, several draws of each of a few rows: exact support, then a binned chi-square test.

    No sample may lie outside the certain and undecidable tokens. The certain tokens of each row are binned in
    descending order of probability; Pearson's statistic of each row, and its sum over the rows, must stay below
    chi-square's critical values, and the mean logarithm of the bins' probabilities, which a temperature moves most,
    within Bernstein's bound. The count of each certain token, and the share of the undecidable ones, must stay within
    Chernoff's bound of the binomial tails. Each of these five tests takes a fifth of alpha. So does one more, for
    errors that depend on the index: the cumulative probability up to the middle of each sample, in order of index, is
    1/2 on average for a right sampler, and must be so within Bernstein's bound. A right sampler fails with a
    probability of 1.2 alpha at most.

    `Expected.value` holds the probabilities, float64 [rows, vocab_size]; its parts ``group`` [batch_size], the row that
    each sample was drawn from, ``margin`` [rows, vocab_size], and, unless it equals `value`, ``chance``
    [rows, vocab_size]: at most this often a token is drawn if a kernel keeps it, and, unless tokens are ordered by
    `value`, ``before`` [rows, vocab_size]: the share of the tokens before each one in descending order of probability.

    Power (measured in tests/families/test_sampling_distribution.py): 2048 draws of a row reject a missing token of
    probability 0.02, and a temperature of 1.1 on normal logits of standard deviation 2.5, with probability above 0.95;
    in a vocabulary of 64 tokens, where such a row has less entropy to lose, the temperature takes 8192 draws. So do
    2048 draws a sampler that takes the larger of two indices in 35 % of them.

    What one case does not show is added up over all cases of a run (`verdict.pooled`): tokens of odd index, the upper
    half of the vocabulary, the more probable half, log-probabilities, the order of index, pairs of equal draws of rare
    tokens, and counts that are too even. Twenty cases of 2048 draws of such a row, in a vocabulary of 128,256, reject
    even tokens that are drawn 10 % too often, a sampler of p^1.05, and random numbers of 11 bits; in one of 64, random
    numbers that are stratified over the draws of a row (tests/families/test_sampling_pooled.py).

    Attributes:
        reason: one line for reports: what the window is made of.
        window: margins of at most this size are undecidable.
        alpha: probability that a right sampler fails one of the five tests.
    """

    reason: str
    window: float = 0.0
    alpha: float = ALPHA

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        """See `Policy.compare`. The worst token is named only where the comparison fails."""
        group = expected.parts["group"]
        if actual.shape != group.shape:
            return wrong_shape(actual, group)
        if group.numel() == 0:
            return Comparison(0.0)
        rows, vocab_size = expected.value.shape
        support = expected.once(Support.of, self.window)
        token = actual.long()
        valid = token.clamp(0, vocab_size - 1)
        place = support.first + valid
        outside = support.never.take(place) | (valid != token)
        count = support.ones.new_zeros(rows * vocab_size).scatter_add_(0, place, support.ones)
        count = count.view(rows, vocab_size) * support.certain
        total = count.sum(dim=-1, keepdim=True)
        exponent = binomial_exponent(count, total, support.probability)
        moved = (count * support.middle).sum()
        splits = torch.stack(
            ((count * support.odd).sum(-1), (count * support.upper).sum(-1), pairs_of(count * support.rare))
        )
        figures = (
            outside.sum(dtype=torch.float64),
            exponent.amax(),
            moved,
            total,
            splits,
            in_parts(support.parts, count),
        )
        wrong, largest, of_indices, *known = torch.cat([figure.flatten() for figure in figures]).tolist()
        if wrong:
            return self._outside(actual, outside, group, support)
        totals, of_splits, in_each = known[:rows], iter(known[rows : 4 * rows]), iter(known[4 * rows :])
        odd, upper, pairs = (list(itertools.islice(of_splits, rows)) for _ in range(3))
        counts = [bins.counts(list(itertools.islice(in_each, MAX_BINS))) for bins in support.bins]
        tests = [*self._thresholds(totals, support), *self._bins(totals, counts, support)]
        tests.append(self._order(of_indices, totals, support))
        tests.append((largest / self._critical_of_tokens(support), "each token as often as expected"))
        ratio, detail = max(tests, key=lambda test: test[0])
        if ratio > 1 and ratio == tests[-1][0]:
            detail = self._worst_token(exponent, count, total, support)
        scores = [*self._of_halves(totals, odd, upper, pairs, support), *self._of_bins(totals, counts, support)]
        order = Score("the order of index", of_indices, self._order_variance(totals, support), 0.5)
        return Comparison(ratio, detail=detail, scores=(*scores, order))

    def zero(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros_like(expected.parts["group"], dtype=dtype)

    def passes_zero(self, expected: Expected, dtype: torch.dtype) -> bool:
        """Without a comparison, if token 0 is outside the support of some row, or far less probable than 1 in it."""
        if expected.parts["group"].numel():
            support = expected.once(Support.of, self.window)
            most = [-draws * math.log(p) for draws, p in zip(support.draws, support.zero, strict=True) if p > 0]
            if support.zero_never or max(most, default=0.0) > self._critical_of_tokens(support):
                return False
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

    def _outside(
        self, actual: torch.Tensor, outside: torch.Tensor, group: torch.Tensor, support: Support
    ) -> Comparison:
        wrong = outside.nonzero().flatten()
        first = int(wrong[0])
        row = int(group[first])
        allowed = (~support.never[row]).nonzero().flatten()
        which = f"only token {int(allowed[0])}" if len(allowed) == 1 else f"{len(allowed)} tokens"
        outside_of = f"{len(wrong)} of {len(outside)} samples are outside the support, first of row {row}"
        return Comparison(math.inf, math.inf, (first,), float(actual[first]), detail=f"allowed: {which}; {outside_of}")

    def _thresholds(self, totals: Sequence[float], support: Support) -> Iterator[tuple[float, str]]:
        """Undecidable samples of each row against their largest share."""
        critical = math.log(TESTS * len(totals) / self.alpha)
        for row, (total, draws, share) in enumerate(zip(totals, support.draws, support.undecided, strict=True)):
            stray = draws - total
            exponent = tail_exponent(stray, draws, share) if stray > draws * share else 0.0
            yield exponent / critical, f"row {row}: {int(stray)} samples at the threshold"

    def _critical_of_tokens(self, support: Support) -> float:
        """What `binomial_exponent` must exceed for the count of one token to be wrong."""
        return math.log(2 * TESTS * max(support.tokens, 1) / self.alpha)

    def _worst_token(self, exponent: torch.Tensor, count: torch.Tensor, total: torch.Tensor, support: Support) -> str:
        """The certain token whose count is least likely: a missing one shows here before it shows in its bin."""
        row, token = divmod(int(exponent.argmax()), count.shape[1])
        drawn, mean = int(count[row, token]), float(support.probability[row, token] * total[row, 0])
        return f"row {row}: token {token} drawn {drawn} times, expected {mean:.1f}"

    def _bins(
        self, totals: Sequence[float], counts: Sequence[Sequence[float]], support: Support
    ) -> Iterator[tuple[float, str]]:
        """Pearson's statistic of each row's certain tokens, and of all rows together; the temperature of all rows."""
        deviation = variance = largest = pooled = 0.0
        degrees, alpha = [max(len(bins.share) - 1, 0) for bins in support.bins], self.alpha / TESTS / len(totals)
        for row, (total, count, bins) in enumerate(zip(totals, counts, support.bins, strict=True)):
            statistic = 0.0
            for number, share, score in zip(count, bins.share, bins.score, strict=True):
                mean = total * share
                off = number - mean
                statistic += off * off / max(mean, TINY)
                deviation += off * score
                variance += mean * score * score
                largest = max(largest, abs(score))
            if degrees[row]:
                pooled += statistic
                yield chi_square(f"row {row}", statistic, degrees[row], alpha)
        yield self._temperature(deviation, variance, largest)
        if sum(degrees):
            yield chi_square("all rows", pooled, sum(degrees), self.alpha / TESTS)

    def _order(self, deviation: float, totals: Sequence[float], support: Support) -> tuple[float, str]:
        """Sum of the middles of all samples, which are within 1/2, against its mean of 0: see `bernstein`."""
        variance = self._order_variance(totals, support)
        mean = deviation / max(sum(totals), 1.0)
        text = f"all rows: in order of index, samples are {mean:+.4f} of the distribution off, on average"
        return bernstein(deviation, variance, 0.5) / math.log(2 * TESTS / self.alpha), text

    def _order_variance(self, totals: Sequence[float], support: Support) -> float:
        return sum(total * spread for total, spread in zip(totals, support.spread, strict=True))

    def _of_halves(
        self,
        totals: Sequence[float],
        odd: Sequence[float],
        upper: Sequence[float],
        pairs: Sequence[float],
        support: Support,
    ) -> Iterator[Score]:
        """Tokens of odd index, those of the upper half of the vocabulary, and pairs of equal draws of rare tokens.

        Of n draws, n (n - 1) / 2 sum p^2 pairs are equal on average, where p are the probabilities of the rare tokens.
        With few distinct random numbers, which fall on few of these, there are more. The variance is that of a
        U-statistic; one draw more makes about n max p pairs more.
        """
        for name, found, shares in (("odd indices", odd, support.odds), ("the upper half", upper, support.uppers)):
            means = [(total, share) for total, share in zip(totals, shares, strict=True)]
            variance = sum(total * share * (1 - share) for total, share in means)
            yield Score(name, sum(found) - sum(total * share for total, share in means), max(variance, 0.0), 1.0)
        deviation = variance = largest = 0.0
        for n, equal, (second, third, most) in zip(totals, pairs, support.powers, strict=True):
            deviation += equal - n * (n - 1) / 2 * second
            spread = n * (n - 1) / 2 * (second - second**2) + n * (n - 1) * (n - 2) * (third - second**2)
            variance += max(spread, 0.0)
            largest = max(largest, n * most + 1)
        yield Score("pairs of equal draws of rare tokens", deviation, variance, largest)

    def _of_bins(self, totals: Sequence[float], counts: Sequence[Sequence[float]], support: Support) -> Iterator[Score]:
        """The more probable half of the bins of each row; the logarithms of all; and how even the counts are: Pearson's
        statistic less its degrees of freedom, which is below -2 sqrt(degrees x) with a probability of exp(-x) at most
        (Laurent and Massart, Ann. Statist. 28, 2000)."""
        head = spread = warm = variance = largest = even = degrees = 0.0
        for total, count, bins in zip(totals, counts, support.bins, strict=True):
            half = (len(bins.share) + 1) // 2
            share = min(1.0, math.fsum(bins.share[:half]))
            head += sum(count[:half]) - total * share
            spread += total * share * (1 - share)
            degrees += max(len(bins.share) - 1, 0)
            for number, part, score in zip(count, bins.share, bins.score, strict=True):
                off, mean = number - total * part, total * part
                warm, variance, largest = warm + off * score, variance + mean * score**2, max(largest, abs(score))
                even += off * off / max(mean, TINY) if len(bins.share) > 1 else 0.0
        yield Score("the more probable half", head, spread, 1.0)
        yield Score("the sum of log-probabilities", warm, variance, largest)
        yield Score("chi-square", even - degrees, 2 * degrees, low=True)

    def _temperature(self, deviation: float, variance: float, largest: float) -> tuple[float, str]:
        """Sum of the scores of all samples against its mean: Bernstein's inequality of bounded independent terms."""
        figures = f"{deviation:.1f}, standard deviation {math.sqrt(variance):.1f}"
        exponent = bernstein(deviation, variance, largest)
        return exponent / math.log(2 * TESTS / self.alpha), f"all rows: sum of log-probabilities is off by {figures}"


def chi_square(who: str, statistic: float, degrees: int, alpha: float) -> tuple[float, str]:
    """The statistic over its critical value, and what to say of it."""
    critical = chi_square_critical(degrees, alpha)
    text = f"{who}: chi-square {statistic:.1f} of {degrees} degrees, critical {critical:.1f}"
    return statistic / critical, text


def pairs_of(count: torch.Tensor) -> torch.Tensor:
    """How many pairs of draws of each row are equal."""
    return (count * (count - 1)).sum(dim=-1) / 2


def binomial_exponent(count: torch.Tensor, total: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """x such that exp(-x) bounds the binomial probability of a count this far from its mean or farther (Chernoff)."""
    mean = total * probability
    rest = total - count
    more = torch.xlogy(count, count / mean.clamp_min(TINY))
    return more + torch.xlogy(rest, rest / (total - mean).clamp_min(TINY))


def tail_exponent(count: float, total: float, probability: float) -> float:
    """`binomial_exponent` of one number."""
    rest, mean = total - count, total * probability
    pairs = (count, mean), (rest, total - mean)
    return sum(number * math.log(number / max(other, TINY)) for number, other in pairs if number > 0)
