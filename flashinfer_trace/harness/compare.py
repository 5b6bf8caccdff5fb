"""Comparison policies: how an actual output is judged against the oracle's `Expected`, and by what bound.

Each policy returns a `Comparison` whose `ratio` is the worst error divided by its bound; a ratio of at most 1 passes.
Cosine similarity and "x % of elements match" are left out on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flashinfer_trace.harness.mutants import MUTANTS, ONE_PER_CENT_TOO_LARGE, Mutant

__all__ = [
    "Comparison",
    "Elementwise",
    "ErrorBound",
    "Exact",
    "Expected",
    "Policy",
    "correctly_rounded",
    "norm_error",
    "rounding_error",
    "summation_error",
    "unit_roundoff",
    "wrong_shape",
]

#: Multiple of the root-mean-square growth of rounding errors that a sum may show (see `summation_error`).
CONFIDENCE = 8.0

#: The widest bound of a gain that can tell one per cent from rounding; wider bounds come from too few elements.
LARGEST_TELLING_GAIN = 0.009


@dataclass(frozen=True)
class Expected:
    """What the oracle expects of one output.

    Attributes:
        value: the exact result, float64 (or integers for index outputs).
        parts: quantities from which bounds are computed, by name, broadcastable to `value`: ``magnitude`` is the sum
            of the absolute values of the terms that were summed (|A||B| for a product).
        exact: whether the inputs were chosen so that every intermediate result, in any order of summation, is
            representable in float32. The output must then be the correctly rounded value, not just within the bound.
    """

    value: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    exact: bool = False


@dataclass(frozen=True)
class Comparison:
    """Outcome for one output.

    Attributes:
        ratio: worst error over its bound; infinite for a NaN, a wrong infinity or a wrong shape; never NaN.
        error: Frobenius norm of the error over that of the expected value (0 if an exact policy passes).
        index, actual, expected, bound: the worst element, for the report.
        detail: further information for the reader (a statistic, a mismatch of shapes).
    """

    ratio: float
    error: float = 0.0
    index: tuple[int, ...] = ()
    actual: float = math.nan
    expected: float = math.nan
    bound: float = math.nan
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
        element = f" at {list(self.index)}: got {self.actual:.9g}, expected {self.expected:.9g}, bound {self.bound:.3g}"
        parts = [f"worst error is {self.ratio:.3g} x its bound{element if self.index else ''}", self.detail]
        return "; ".join(part for part in parts if part)


def wrong_shape(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """The failure of an output whose shape is not that of `expected`."""
    return Comparison(math.inf, math.inf, detail=f"shape {list(actual.shape)}, expected {list(expected.shape)}")


class Policy(Protocol):
    """How one output is compared."""

    @property
    def reason(self) -> str:
        """Why this bound, in one line."""

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        """Judges `actual`; never raises for wrong values, shapes or NaN: those are failures."""

    def zero(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        """An output of zeros with the shape of `expected`. A case in which it passes proves nothing."""

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        """The mutants that `compare` must reject in this case."""


class Elementwise:
    """Shared by the policies that expect a particular value for every element."""

    def zero(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(expected.value.shape, dtype=dtype, device=expected.value.device)

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        return MUTANTS


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest: half the distance from 1.0 to the next number."""
    return torch.finfo(dtype).eps / 2


def rounding_error(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bound on one rounding of `value` (float64) to `dtype`: u |value|, at least half the smallest subnormal."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps / 2
    return (value.abs() * unit_roundoff(dtype)).clamp_min(smallest)


def summation_error(magnitude: torch.Tensor, length: int | torch.Tensor) -> torch.Tensor:
    """Bound on float32 summation of `length` terms whose absolute values add up to `magnitude`, in any order.

    The rounding errors of a sum are close to independent and of zero mean, so they grow with the square root of the
    length: the bound is CONFIDENCE * sqrt(n) * u * magnitude, exceeded with probability below 2 exp(-CONFIDENCE^2/2)
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019). The
    worst-case bound n u is about ten times as wide at n = 7168 and would hide a wrong scale.
    """
    root = math.sqrt(length) if isinstance(length, int) else length.sqrt()
    return magnitude * (CONFIDENCE * unit_roundoff(torch.float32) * root)


def correctly_rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` (float64) rounded once to `dtype`, to nearest, ties to even; returned as float64.

    torch converts float64 to bfloat16 and float16 through float32, which rounds twice. Rounding the float32 step to
    odd makes the second rounding the only one that counts (Boldo and Melquiond, IEEE Trans. Comput. 57, 2008).
    """
    if dtype in (torch.float64, torch.float32):
        return value.to(dtype).double()
    nearest = value.float()
    inexact = (nearest.double() != value) & nearest.isfinite()
    bits = nearest.view(torch.int32)
    toward_zero = torch.where(inexact & (nearest.double().abs() > value.abs()), bits - 1, bits)
    odd = torch.where(inexact, toward_zero | 1, bits).view(torch.float32)
    return odd.to(dtype).double()


def norm_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the error over that of the expected value, over elements where both are finite."""
    finite = expected.isfinite() & actual.isfinite()
    difference = torch.where(finite, actual.double() - expected, 0.0).norm().item()
    size = torch.where(finite, expected, 0.0).norm().item()
    return difference / size if size else (0.0 if difference == 0 else math.inf)


@dataclass(frozen=True)
class ErrorBound(Elementwise):
    """Every element must be within a bound derived from the oracle; infinities and their signs must match.

    Attributes:
        bound: maps `Expected` to the absolute bound of each element (float64).
        reason: one line for reports and docs/accuracy.md.
        gain: if given, maps `Expected` to the bound on |<actual, expected> / <expected, expected> - 1|. A scale that
            is off by less than the elementwise bound shows in this average.
    """

    bound: Callable[[Expected], torch.Tensor]
    reason: str
    gain: Callable[[Expected], float] | None = None

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value = expected.value
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        if value.numel() == 0:
            return Comparison(0.0)
        computed = actual.double()
        bound = self.element_bound(expected, actual.dtype)
        error = (computed - value).abs()
        ratio = torch.where(error == 0, 0.0, error / bound)
        same_infinity = ~value.isfinite() & (computed == value)
        ratio = torch.where(same_infinity, 0.0, torch.where(value.isfinite() & computed.isfinite(), ratio, math.inf))
        worst = int(ratio.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), value.shape))
        comparison = Comparison(
            float(ratio.flatten()[worst]),
            norm_error(computed, value),
            index,
            float(computed[index]),
            float(value[index]),
            float(bound[index]),
        )
        return self._with_gain(comparison, computed, expected)

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        """All mutants, but not a wrong scale if the roundings that the gain allows for add up to as much."""
        if self.gain is None or self.gain(expected) <= LARGEST_TELLING_GAIN:
            return MUTANTS
        return tuple(mutant for mutant in MUTANTS if mutant is not ONE_PER_CENT_TOO_LARGE)

    def element_bound(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        """The bound of each element for an output of this dtype."""
        if expected.exact:
            rounded = correctly_rounded(expected.value, dtype)
            # A tie may be rounded either way; anything farther away than the nearest value is wrong.
            return (rounded - expected.value).abs()
        return self.bound(expected).expand_as(expected.value)

    def _with_gain(self, comparison: Comparison, computed: torch.Tensor, expected: Expected) -> Comparison:
        if self.gain is None or not comparison.passed:
            return comparison
        finite = expected.value.isfinite()
        value = torch.where(finite, expected.value, 0.0)
        size = (value * value).sum()
        if size == 0:
            return comparison
        gain = float((torch.where(finite, computed, 0.0) * value).sum() / size) - 1.0
        limit = self.gain(expected)
        detail = f"gain is off by {gain:.2e}, bound {limit:.2e}"
        if abs(gain) / limit <= comparison.ratio:
            return comparison
        return Comparison(abs(gain) / limit, comparison.error, detail=detail)


@dataclass(frozen=True)
class Exact(Elementwise):
    """Integers, booleans and copied values must be equal, element for element."""

    reason: str = "integers are exact"

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value = expected.value
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        wrong = (actual.double() != value.double()).flatten().nonzero()
        if not len(wrong):
            return Comparison(0.0)
        index = tuple(int(i) for i in torch.unravel_index(wrong[0, 0].cpu(), value.shape))
        detail = f"{len(wrong)} of {value.numel()} elements differ"
        return Comparison(math.inf, math.inf, index, float(actual[index]), float(value[index]), 0.0, detail)
