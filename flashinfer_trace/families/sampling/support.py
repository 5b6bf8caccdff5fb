"""What a window makes of the oracle's margins: the support of samples, and the bins in which they are counted."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flashinfer_trace.verdict.compare import Expected

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
    """Sums of the first 0, 1, 2, ... elements of each row of [rows, length]: float64 [rows, length + 1].

    Parts of a row are summed first, then the parts: a GPU has one block of threads for each row that it scans, which
    takes longer for a whole vocabulary than all else that an oracle does.
    """
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
    """What samples may be, on their device, and what is expected of them, on the host.

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
    """The probability of the tokens before each one in order of index, and half its own, less 1/2.

    Of any distribution its mean is 0, because sum p_i (p_1 + ... + p_(i-1) + p_i / 2) is half of (sum p_i)^2.
    """
    return running_sums(probability)[:, :-1].add_(probability, alpha=0.5).sub_(0.5)


def spread_of(probability: torch.Tensor) -> torch.Tensor:
    """Variance of `middle_of` of a draw: that of a uniform number, 1/12, less that within the tokens, sum p^3 / 12."""
    return (1 - probability.pow(3).sum(dim=-1)).clamp_min(0.0) / 12


def in_parts(parts: torch.Tensor, amounts: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of each part, float64 [rows, MAX_BINS]."""
    return amounts.new_zeros(len(parts), MAX_BINS).scatter_add_(1, parts, amounts)


def parts_of(expected: Expected) -> torch.Tensor:
    """Which of MAX_BINS parts of about equal mass each token is in: the most probable ones are in the first."""
    before = expected.parts.get("before")
    if before is None:
        ordered, order = expected.value.sort(dim=-1, descending=True, stable=True)
        before = torch.empty_like(ordered).scatter_(1, order, running_sums(ordered)[:, :-1])
    return (before * MAX_BINS).clamp_(0, MAX_BINS - 1).long()


def bins_of(mass: list[float], logarithms: list[float], draws: float) -> Bins:
    """Bins of consecutive parts of a row, each with at least MIN_EXPECTED expected draws.

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
