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
from typing import NamedTuple

import torch

from flashinfer_trace.verdict.compare import Comparison, Expected, Score, wrong_shape
from flashinfer_trace.verdict.pooled import bernstein
from flashinfer_trace.verdict.wrong_outputs import ANY_OUTPUT, Mutant

#: Smallest expected count of a bin. Pearson's statistic follows chi-square down to `distribution.ALPHA` only if no bin
#: is far from normal: at 20 expected draws the Poisson tail of one bin stays below the chi-square tail beyond the
#: critical value.
MIN_EXPECTED = 20.0

#: Bins of about equal mass. A wrong temperature moves mass steadily from one end of the order to the other: 16 bins see
#: over 95 % of what unbinned counts would, at half the degrees of freedom of 32.
MAX_BINS = 16

#: Expected draws of a token, below which two draws of it are a coincidence.
RARE = 0.5

#: Keeps quotients and logarithms of unused entries finite.
TINY = 1e-300

#: Elements of a row that are summed one after the other.
PART = 512


def running_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of the first 0, 1, 2, ... elements of each row of [rows, length]: float64 [rows, length + 1]. Parts of a row
    are summed first, then the parts: a GPU has one block of threads for each row that it scans, which takes longer for
    a whole vocabulary than all else that an oracle does."""
    rows, length = values.shape
    count = -(-(length + 1) // PART)
    padded = torch.nn.functional.pad(values, (1, count * PART - length - 1))
    within = padded.view(rows, count, PART).cumsum(dim=-1, dtype=torch.float64)
    if count > 1:
        before = torch.nn.functional.pad(within[:, :-1, -1].cumsum(dim=-1), (1, 0))
        within = within + before.unsqueeze(-1)
    return within.view(rows, count * PART)[:, : length + 1]


class Bins(NamedTuple):
    """The bins of one row.

    Attributes:
        joined: the bin that each of MAX_BINS parts of the row joins.
        share: of each bin in the row's certain tokens.
        score: mean logarithm of the probabilities in each bin, less its mean over all bins.
    """

    joined: list[int]
    share: list[float]
    score: list[float]

    def counts(self, drawn: list[float]) -> list[float]:
        """How many samples each bin has, given those of each part."""
        counts = [0.0] * len(self.share)
        for bin_of_part, number in zip(self.joined, drawn, strict=True):
            counts[bin_of_part] += number
        return counts


@dataclass(frozen=True)
class Support:
    """The tokens that samples can be, on their device, and the expectations of them, on the host.

    Attributes:
        certain: tokens that are certainly kept and may be drawn, bool [rows, vocab_size].
        never: tokens that are certainly not kept, bool [rows, vocab_size].
        probability: of each certain token among them, float64 [rows, vocab_size].
        parts: which of MAX_BINS parts of its row each token is in, int64 [rows, vocab_size].
        first: the place of token 0 of each sample's row in a tensor [rows, vocab_size], int64 [batch_size].
        ones: float64 [batch_size].
        tokens: how many certain ones there are.
        undecided: of each row, at most this share of its draws may be tokens that are neither certain nor certainly not
            kept; rounding may also let a draw fall through to a token at the threshold, hence the window in it.
        draws: of each row.
        bins: of each row.
        middle: of each certain token, the probability of those before it in order of index and half its own, less 1/2;
            float64 [rows, vocab_size].
        spread: variance of the middle of a draw, of each row; its mean is 0.
        zero_never: whether token 0 is certainly not kept in some row.
        zero: probability of token 0 in each row, 0 where it is not certain.
        odd, upper: which indices are odd, and which are in the upper half of the vocabulary; float64 [vocab_size].
        odds, uppers: the probability of those, of each row.
        rare: tokens that are expected less than RARE times, bool [rows, vocab_size].
        powers: of each row, the sums of p^2 and p^3 of these, and the largest p.
    """

    certain: torch.Tensor
    never: torch.Tensor
    probability: torch.Tensor
    parts: torch.Tensor
    first: torch.Tensor
    ones: torch.Tensor
    tokens: int
    undecided: list[float]
    draws: list[int]
    bins: list[Bins]
    middle: torch.Tensor
    spread: list[float]
    zero_never: bool
    zero: list[float]
    odd: torch.Tensor
    upper: torch.Tensor
    odds: list[float]
    uppers: list[float]
    rare: torch.Tensor
    powers: list[tuple[float, float, float]]

    @classmethod
    def of(cls, expected: Expected, window: float) -> Support:
        """All that the host has to know comes in one transfer."""
        value, group, margin = expected.value, expected.parts["group"], expected.parts["margin"]
        rows, vocab_size = value.shape
        certain, never = (margin > window) & (value > 0), margin < -window
        undecided = expected.parts.get("chance", value).masked_fill(certain | never, 0.0).sum(dim=-1)
        weight = value * certain
        probability = weight / weight.sum(dim=-1, keepdim=True).clamp_min(TINY)
        parts = expected.once(parts_of)
        index = torch.arange(vocab_size, device=value.device)
        odd, upper = (index % 2).double(), (index >= vocab_size // 2).double()
        ones = torch.ones(group.shape, dtype=torch.float64, device=value.device)
        drawn = ones.new_zeros(rows).scatter_add_(0, group, ones)
        rare = probability * drawn.unsqueeze(1) < RARE
        figures = [
            drawn,
            undecided,
            probability[:, 0],
            never[:, 0].double(),
            certain.sum(dim=-1, dtype=torch.float64),
            spread_of(probability),
            *(probability @ which for which in (odd, upper)),
            *((probability * rare).pow(power).sum(dim=-1) for power in (2, 3)),
            (probability * rare).amax(dim=-1),
            *(in_parts(parts, amounts).flatten() for amounts in (probability, torch.xlogy(probability, probability))),
        ]
        known = iter(torch.cat(figures).tolist())
        draws, share, zero, zero_never, tokens, spread, odds, uppers, second, third, most = (
            list(itertools.islice(known, rows)) for _ in range(11)
        )
        mass, logarithms = ([list(itertools.islice(known, MAX_BINS)) for _ in range(rows)] for _ in range(2))
        return cls(
            certain,
            never,
            probability,
            parts,
            group * vocab_size,
            ones,
            int(sum(tokens)),
            [min(each + window, 1.0) for each in share],
            [int(count) for count in draws],
            [bins_of(*row) for row in zip(mass, logarithms, draws, strict=True)],
            middle_of(probability) * certain,
            spread,
            any(zero_never),
            zero,
            odd,
            upper,
            odds,
            uppers,
            rare,
            list(zip(second, third, most, strict=True)),
        )


def middle_of(probability: torch.Tensor) -> torch.Tensor:
    """The probability of the tokens before each one in order of index, and half its own, less 1/2. Of any distribution
    its mean is 0, because sum p_i (p_1 + ... + p_(i-1) + p_i / 2) is half of (sum p_i)^2."""
    return running_sums(probability)[:, :-1].add_(probability, alpha=0.5).sub_(0.5)


def spread_of(probability: torch.Tensor) -> torch.Tensor:
    """Variance of `middle_of` of a draw: that of a uniform number, 1/12, less that within the tokens, sum p^3 / 12."""
    return (1 - probability.pow(3).sum(dim=-1)).clamp_min(0.0) / 12


def in_parts(parts: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    return amounts.new_zeros(len(parts), MAX_BINS).scatter_add_(1, parts, amounts)


def parts_of(expected: Expected) -> torch.Tensor:
    """Which of MAX_BINS parts of about equal mass each token is in: the most probable ones are in the first."""
    before = expected.parts.get("before")
    if before is None:
        ordered, order = expected.value.sort(dim=-1, descending=True, stable=True)
        before = torch.empty_like(ordered).scatter_(1, order, running_sums(ordered)[:, :-1])
    return (before * MAX_BINS).clamp_(0, MAX_BINS - 1).long()


def bins_of(mass: list[float], logarithms: list[float], draws: float) -> Bins:
    """Bins of consecutive parts of a row, each where at least `MIN_EXPECTED` draws are expected.

    Args:
        mass: of each part, 1 in all, or 0.
        logarithms: of each part, the sum of p log p over its tokens.
        draws: of the row.
    """
    joined = closed_bins(mass, draws)
    share, total = [0.0] * (joined[-1] + 1), [0.0] * (joined[-1] + 1)
    for part, number in enumerate(joined):
        share[number] += mass[part]
        total[number] += logarithms[part]
    center = math.fsum(total)
    score = [logarithm / part - center if part else 0.0 for logarithm, part in zip(total, share, strict=True)]
    return Bins(joined, share, score)


def closed_bins(mass: list[float], draws: float) -> list[int]:
    """The bin that each of MAX_BINS parts of a row joins: one is closed only when it is full. The parts left over at
    the end join the last full one."""
    merged, current, filled = [], 0, 0.0
    for part in mass:
        merged.append(current)
        filled += part
        if filled * draws >= MIN_EXPECTED:
            current, filled = current + 1, 0.0
    return [min(number, max(current - 1, 0)) for number in merged]


#: Probability that a right sampler fails one of TESTS checks of one comparison. Each test takes an equal part of it.
#: The test of the order of indices takes another such part, so a comparison has 1.2 x 10^-8. A full run
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
    """The probability that chi-square of `degrees` degrees of freedom exceeds a positive `value`. The sum of Abramowitz
    and Stegun, "Handbook of Mathematical Functions", 26.4.4 and 26.4.5."""
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

    No sample may lie outside the certain and undecidable tokens. The certain tokens of each row are binned by
    probability. Five tests each take a fifth of alpha: Pearson's statistic of each row, and of all rows; the mean
    logarithm of the bins' probabilities, which a temperature moves most (Bernstein); the count of each certain token,
    and the share of the undecidable ones (Chernoff). One more is for errors that depend on the index: the cumulative
    probability up to the middle of each sample is 1/2 on average. A right sampler fails with a probability of 1.2 alpha
    at most.

    `Expected.value` holds the probabilities, float64 [rows, vocab_size]; its parts ``group`` [batch_size], the row that
    each sample was drawn from, ``margin`` [rows, vocab_size], and, unless it equals `value`, ``chance``
    [rows, vocab_size]: at most this often a token is drawn if a kernel keeps it, and, unless tokens are ordered by
    `value`, ``before`` [rows, vocab_size]: the share of the tokens before each one in descending order of probability.

    tests/families/test_sampling_distribution.py measures its power. Errors too small for one case to show are added up
    over all cases of a run (`verdict.pooled`, tests/families/test_sampling_pooled.py).

    Attributes:
        reason: one line for reports: the parts of the window.
        window: margins of at most this size are undecidable.
        alpha: probability that a right sampler fails one of the five tests.
    """

    reason: str
    window: float = 0.0
    alpha: float = ALPHA

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
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
        critical = math.log(TESTS * len(totals) / self.alpha)
        for row, (total, draws, share) in enumerate(zip(totals, support.draws, support.undecided, strict=True)):
            stray = draws - total
            exponent = tail_exponent(stray, draws, share) if stray > draws * share else 0.0
            yield exponent / critical, f"row {row}: {int(stray)} samples at the threshold"

    def _critical_of_tokens(self, support: Support) -> float:
        """The number that `binomial_exponent` must exceed for the count of one token to be wrong."""
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
        """Tokens of odd index, those of the upper half of the vocabulary, and pairs of equal draws of rare tokens: of n
        draws n (n - 1) / 2 sum p^2, more with few distinct random numbers. The variance is that of a U-statistic."""
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
