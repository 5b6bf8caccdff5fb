"""The errors of one output as a whole: their signs, and which elements are beyond their bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from flashinfer_trace.verdict.compare import Comparison, ErrorBound, Exact, Expected, Policy

#: The largest mean of signed errors, in bounds, that roundings to nearest may have: what tensor cores and approximate
#: functions lose in one direction is far below one rounding of the output, which is most of each bound.
ONE_SIDED = 1 / 8
#: Probability that a right kernel exceeds it by chance in one of the two means of an output.
SIGNS_ALPHA = 1e-8
#: So many columns of a row are looked at.
COLUMNS = 512


@dataclass
class RowSigns:
    """Mean signed errors of the rows of one output in all cases so far: what has one sign shows, however small it is.

    A kernel that truncates its results instead of rounding them stays within a bound of two roundings, and is off by a
    third of that bound on average, toward zero. So each row (of the first axis) gives two means of (actual - expected)
    / bound: as they are, and with the sign of what is expected. Elements of a row may share a rounding; rows do not, so
    their means are n independent numbers from -1 to 1.

    Suppose that the expectation of each is within ONE_SIDED, and that v is their sample variance. With a probability of
    1 - a, their average is then within ``ONE_SIDED + sqrt(2 v log(4 / a) / n) + 14 log(4 / a) / (3 (n - 1))`` (Maurer
    and Pontil, "Empirical Bernstein bounds", COLT 2009, theorem 4, for a range of 2). With a = SIGNS_ALPHA, fewer than
    about 110 rows never fail.
    """

    rows: list[torch.Tensor] = field(default_factory=list)

    def add(self, policy: Policy, actual: torch.Tensor, expected: Expected) -> None:
        """Adds the rows of one case. Exact results are left out, as ties go one way; so are policies without bounds of
        each element, such as those of kernels that are known to truncate. Elements beyond their bound passed by another
        rule, as copied ones do: they are left out too."""
        value = expected.value
        if not isinstance(policy, ErrorBound) or expected.exact or value.ndim < 2 or not value.numel():
            return
        bound = policy.element_bound(expected, actual.dtype)
        step = -(-value[0].numel() // COLUMNS)
        got, want, most = (each.reshape(len(value), -1)[:, ::step].double() for each in (actual, value, bound))
        error = (got - want) / most
        usable = (error.abs() <= 1) & want.isfinite()
        if expected.unjudged is not None:
            usable &= ~expected.unjudged.view(-1, 1)
        error = error.masked_fill(~usable, 0.0)
        count = usable.sum(dim=1)
        means = torch.stack([error.sum(dim=1), (error * want.nan_to_num().sign()).sum(dim=1)]) / count
        self.rows.append(means[:, count > 0].cpu())

    def comparison(self) -> Comparison | None:
        """That of the worse mean with its limit; None without rows."""
        means = torch.cat(self.rows, dim=1) if self.rows else torch.empty(2, 0)
        count = means.shape[1]
        if count < 2:
            return None
        log = math.log(4 / SIGNS_ALPHA)
        chance = (2 * means.var(dim=1) * log / count).sqrt() + 14 * log / (3 * (count - 1))
        ratios = means.mean(dim=1).abs() / (ONE_SIDED + chance)
        worse = int(ratios.argmax())
        mean, direction = float(means[worse].mean()), ("", " away from zero")[worse]
        text = f"over {count} rows of all cases, errors are {mean:+.3f} x the bound{direction} on average"
        limit = f"roundings to nearest stay within {float(ONE_SIDED + chance[worse]):.3f}"
        return Comparison(float(ratios[worse]), detail=f"{text}; {limit}")


@dataclass(frozen=True)
class SignedErrors:
    """Means of (actual - expected) / bound over the elements where all three are finite and the bound is not 0.

    Roundings to nearest have a mean near 0: less than a few times `standard_error`. A mean that is not has a cause.

    Attributes:
        count: of these elements.
        mean: in bounds.
        outward: the same with the sign of what is expected: positive away from zero, negative toward it.
        standard_error: of either mean, if the errors were independent.
    """

    count: int
    mean: float
    outward: float
    standard_error: float


def signed_errors(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> SignedErrors:
    """The signed errors of an output.

    Args:
        actual: of any dtype and shape.
        expected, bound: float64, of the same shape.
    """
    error = (actual.double() - expected) / bound
    usable = error.isfinite() & expected.isfinite()
    count = int(usable.sum())
    if not count:
        return SignedErrors(0, 0.0, 0.0, 0.0)
    error, sign = error[usable], expected[usable].sign()
    spread = float(error.square().mean().sqrt())
    return SignedErrors(count, float(error.mean()), float((error * sign).mean()), spread / count**0.5)


def element_bound(policy: Policy, expected: Expected, dtype: torch.dtype) -> torch.Tensor | None:
    """The bound of each element, float64; None under a policy that has none for each."""
    if isinstance(policy, ErrorBound):
        return policy.element_bound(expected, dtype)
    return torch.zeros_like(expected.value, dtype=torch.float64) if isinstance(policy, Exact) else None


def beyond_bound(actual: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Which elements are wrong: beyond their bounds, NaN or infinite where that is not expected."""
    computed, value = actual.double(), value.double()
    same = (computed == value) | (computed.isnan() & value.isnan())
    return ~(((computed - value).abs() <= bound) | same)
