"""Comparison policies: how an actual output is judged against the oracle's `Expected`, and by what bound.

Each policy returns a `Comparison` whose `ratio` is the worst error divided by its bound; a ratio of at most 1 passes.
Cosine similarity and "x % of elements match" are left out on purpose.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from flashinfer_trace.verdict.wrong_outputs import MUTANTS, ONE_PER_CENT_TOO_LARGE, Mutant

#: Multiple of the root-mean-square growth of rounding errors that a sum may show (see `summation_error`).
CONFIDENCE = 8.0

#: The widest bound of a gain that can tell one per cent from rounding; wider bounds come from too few elements.
LARGEST_TELLING_GAIN = 0.009

#: Standard deviations of the share of a near miss, and the largest limit of it that tells one from the right function.
MISS_CONFIDENCE, LARGEST_TELLING_SHARE = 8.0, 0.75

Result = TypeVar("Result")


@dataclass(frozen=True)
class Expected:
    """The oracle's expectation of one output.

    Attributes:
        value: the exact result, float64 (or integers for index outputs).
        parts: quantities from which bounds are computed, by name, broadcastable to `value`: ``magnitude`` is the sum
            of the absolute values of the terms that were summed (|A||B| for a product).
        exact: whether the inputs make every intermediate result, in any order of summation, representable in float32.
            The output must then be the correctly rounded value, not just within the bound.
        unjudged: bool [rows], if given: the rows (of the first axis) that may be anything, as their inputs are NaN.
    """

    value: torch.Tensor
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    exact: bool = False
    unjudged: torch.Tensor | None = None
    _known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, compute: Callable[..., Result], *arguments: Hashable) -> Result:
        """compute(self, *arguments), computed at the first call: bounds and norms serve a reference and all kernels."""
        key = (compute, arguments)
        if key not in self._known:
            self._known[key] = compute(self, *arguments)
        result: Result = self._known[key]
        return result

    def knows(self, compute: Callable[..., Any], *arguments: Hashable) -> bool:
        """Whether `once` has computed this, or was given its result."""
        return (compute, arguments) in self._known

    def tell(self, result: Result, compute: Callable[..., Result], *arguments: Hashable) -> None:
        """Has `once` return this result, which was computed together with something else."""
        self._known[compute, arguments] = result


@dataclass(frozen=True)
class Score:
    """A sum over the draws of one case, or of several: of mean 0 for a right sampler.

    Attributes:
        name: what it sums.
        deviation, variance: the sum, and its variance.
        largest: size that no term exceeds.
        low: whether only a sum below 0 is wrong.
    """

    name: str
    deviation: float
    variance: float
    largest: float = 0.0
    low: bool = False

    def __add__(self, other: Score) -> Score:
        largest = max(self.largest, other.largest)
        return Score(self.name, self.deviation + other.deviation, self.variance + other.variance, largest, self.low)


@dataclass(frozen=True)
class Comparison:
    """Outcome for one output.

    Attributes:
        ratio: worst error over its bound; infinite for a NaN, a wrong infinity or a wrong shape; never NaN.
        error: Frobenius norm of the error over that of the expected value (0 if an exact policy passes).
        index, actual, expected, bound: the worst element, for the report of one that fails; expected and bound are NaN
            where no one number is expected.
        detail: further information for the reader (a statistic, a mismatch of shapes).
        scores: of a sampler, what is added up over all cases (see `verdict.pooled`).
    """

    ratio: float
    error: float = 0.0
    index: tuple[int, ...] = ()
    actual: float = math.nan
    expected: float = math.nan
    bound: float = math.nan
    detail: str = ""
    scores: tuple[Score, ...] = ()

    @property
    def passed(self) -> bool:
        return self.ratio <= 1.0

    def __str__(self) -> str:
        element = f" at {list(self.index)}: got {self.actual:.9g}"
        if not (math.isnan(self.expected) and math.isnan(self.bound)):
            element += f", expected {self.expected:.9g}, bound {self.bound:.3g}"
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
        """An output of zeros with the shape of `expected`."""

    def passes_zero(self, expected: Expected, dtype: torch.dtype) -> bool:
        """Whether an output of zeros passes; if it does, the case proves nothing."""

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        """The mutants that `compare` must reject in this case."""


class Elementwise(abc.ABC):
    """Shared by the policies that expect a particular value for every element."""

    @abc.abstractmethod
    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        """See `Policy.compare`."""

    def zero(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(expected.value.shape, dtype=dtype, device=expected.value.device)

    def passes_zero(self, expected: Expected, dtype: torch.dtype) -> bool:
        return self.compare(self.zero(expected, dtype), expected).passed

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
    length. Their bound is ``CONFIDENCE * sqrt(n) * u * magnitude``. The probability of more is below
    ``2 exp(-CONFIDENCE^2/2)`` (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
    Comput. 41, 2019). The worst-case bound n u is about ten times as wide at n = 7168 and would hide a wrong scale.
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
    return relative(difference, size)


def relative(error: float, size: float) -> float:
    """`error` over `size`; an error of what is zero is infinite."""
    return error / size if size else (0.0 if error == 0 else math.inf)


def host_figures(*figures: torch.Tensor) -> list[float]:
    """0-d tensors as numbers, in one transfer: each transfer waits for all that a GPU has been given to do."""
    values: list[float] = torch.stack([figure.double() for figure in figures]).tolist()
    return values


def place(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of the element at `position` of the flattened tensor."""
    index: list[int] = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.insert(0, remainder)
    return tuple(index)


def norm_of(expected: Expected) -> float:
    """Frobenius norm of the expected value: infinite or NaN if an element is."""
    return float(expected.value.norm())


def all_finite(expected: Expected) -> bool:
    """Whether no expected element is infinite or NaN, nor their norm too large for float64."""
    return math.isfinite(expected.once(norm_of))


def finite_value(expected: Expected) -> torch.Tensor:
    """The expected value with 0 for what is infinite or NaN."""
    return expected.value if all_finite(expected) else torch.where(expected.value.isfinite(), expected.value, 0.0)


def not_finite(expected: Expected) -> torch.Tensor:
    """Which expected elements are infinite or NaN."""
    return ~expected.value.isfinite()


def size_of(expected: Expected) -> float:
    """Frobenius norm of the finite part of the expected value."""
    return expected.once(norm_of) if all_finite(expected) else float(expected.once(finite_value).norm())


def distance_to_rounded(expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """How far each expected value is from the nearest number of `dtype`.

    A tie may go either way without being wrong; anything farther than the nearest value is.
    """
    distance: torch.Tensor = correctly_rounded(expected.value, dtype) - expected.value
    return distance.abs_()


def rounding_norm_error(expected: Expected, dtype: torch.dtype) -> float:
    """`norm_error` of the correctly rounded expected value."""
    return norm_error(correctly_rounded(expected.value, dtype), expected.value)


@dataclass(frozen=True)
class ErrorBound(Elementwise):
    """Every element must be within a bound derived from the oracle; infinities and their signs must match.

    Attributes:
        bound: maps `Expected` to the absolute bound of each element (float64).
        reason: one line for reports and docs/accuracy.md.
        gain: if given, maps `Expected` to the bound on |<actual, expected> / <expected, expected> - 1|. A scale that
            is off by less than the elementwise bound shows in this average.
        near_miss: if given, maps `Expected` to how far another function is from the right one, which the bound cannot
            tell from it in any one element. The errors must not have half of it or more, on average: e is the error,
            d this difference and b the bound, and sum e d / b^2 over sum d^2 / b^2 is 0 for the right function, 1 for
            the other. Roundings to nearest are within b, and move it by MISS_CONFIDENCE / sqrt(3 sum d^2 / b^2) at most
            (Hoeffding; a third of b^2 bounds the variance proxy of each). A case that cannot tell the two so is not
            judged by it.
    """

    bound: Callable[[Expected], torch.Tensor]
    reason: str
    gain: Callable[[Expected], float] | None = None
    near_miss: Callable[[Expected], torch.Tensor] | None = None

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        """See `Policy.compare`. The worst element is named only where the comparison fails."""
        value = expected.value
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        if value.numel() == 0:
            return Comparison(0.0)
        comparison = self._passing(actual, expected)
        return self._failing(actual, expected) if comparison is None else comparison

    def passes_zero(self, expected: Expected, dtype: torch.dtype) -> bool:
        if expected.once(largest_excess, self, dtype) > 0:
            return False
        return super().passes_zero(expected, dtype)

    def mutants(self, expected: Expected) -> tuple[Mutant, ...]:
        """All mutants, but not a wrong scale if the roundings that the gain allows for add up to as much."""
        if self.gain is None or expected.once(self.gain) <= LARGEST_TELLING_GAIN:
            return MUTANTS
        return tuple(mutant for mutant in MUTANTS if mutant is not ONE_PER_CENT_TOO_LARGE)

    def element_bound(self, expected: Expected, dtype: torch.dtype) -> torch.Tensor:
        """The bound of each element for an output of this dtype."""
        if expected.exact:
            return expected.once(distance_to_rounded, dtype)
        return expected.once(self.bound).expand_as(expected.value)

    def _passing(self, actual: torch.Tensor, expected: Expected) -> Comparison | None:
        """The comparison if it passes, in one transfer and few passes over the elements; None if it does not."""
        computed, value, bound = (
            actual.double(),
            expected.once(finite_value),
            self.element_bound(expected, actual.dtype),
        )
        if not all_finite(expected):
            same = torch.where(computed == expected.value, 0.0, math.inf)
            computed = torch.where(expected.once(not_finite), same, computed)
        difference = computed - value
        difference_of = difference if self.near_miss is None else difference.clone()
        norm = difference.norm()
        error = difference.abs_()
        ratio = error / bound
        figures = [ratio.amax(), norm]
        if self.gain is not None:
            figures.append(torch.dot(computed.flatten(), value.flatten()))
        if not expected.knows(largest_excess, self, actual.dtype):
            figures.append((expected.once(magnitude_of) - bound).amax())
        worst, distance, *others = host_figures(*figures)
        if not expected.knows(largest_excess, self, actual.dtype):
            expected.tell(others.pop(), largest_excess, self, actual.dtype)
        if math.isnan(worst):  # perhaps from an error of 0 whose bound is 0
            worst = float(ratio.masked_fill_(error == 0, 0.0).amax())
        size = expected.once(size_of)
        # An element that is infinite or NaN, and ought not to be, shows in the norm of all errors.
        if not (worst <= 1.0 and math.isfinite(distance)):
            return None
        comparison = Comparison(worst, relative(distance, size))
        if self.gain is not None and size:
            comparison = self._with_gain(comparison, others[0] / size / size - 1.0, expected)
        return (
            comparison if self.near_miss is None else self._with_near_miss(comparison, difference_of, bound, expected)
        )

    def _with_near_miss(
        self, comparison: Comparison, error: torch.Tensor, bound: torch.Tensor, expected: Expected
    ) -> Comparison:
        """The comparison, or that of the share of the near miss with its limit if it is worse."""
        assert self.near_miss is not None
        off = expected.once(self.near_miss) / bound
        share, size = host_figures(torch.dot((error / bound).flatten(), off.flatten()), off.square().sum())
        if not size:
            return comparison
        share, limit = abs(share / size), 0.5 + MISS_CONFIDENCE / math.sqrt(3 * size)
        if limit > LARGEST_TELLING_SHARE or share / limit <= comparison.ratio:
            return comparison
        detail = f"errors have {share:.2f} of the difference to a near miss, limit {limit:.2f}"
        return Comparison(share / limit, comparison.error, detail=detail)

    def _failing(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        """The comparison of an output with an element beyond its bound, infinite or NaN: the worst one is named."""
        value, computed, bound = expected.value, actual.double(), self.element_bound(expected, actual.dtype)
        finite = value.isfinite() & computed.isfinite()
        error = torch.where(finite, computed - value, 0.0)
        ratio = torch.where(finite, (error.abs() / bound).masked_fill_(error == 0, 0.0), math.inf)
        ratio.masked_fill_(~value.isfinite() & (computed == value), 0.0)
        worst = ratio.argmax()
        figures = [torch.take(each, worst) for each in (ratio, computed, value, bound)]
        position, largest, got, wanted, limit = host_figures(worst, *figures)
        index = place(int(position), value.shape)
        return Comparison(largest, norm_error(computed, value), index, got, wanted, limit)

    def _with_gain(self, comparison: Comparison, gain: float, expected: Expected) -> Comparison:
        """The comparison, or that of the gain with its bound if it is worse."""
        assert self.gain is not None
        limit = expected.once(self.gain)
        if abs(gain) / limit <= comparison.ratio:
            return comparison
        return Comparison(abs(gain) / limit, comparison.error, detail=f"gain is off by {gain:.2e}, bound {limit:.2e}")


def largest_excess(expected: Expected, policy: ErrorBound, dtype: torch.dtype) -> float:
    """How far the largest value beyond its bound is beyond it; NaN, which is nowhere, where one is infinite or NaN."""
    if not expected.value.numel():
        return 0.0
    excess = expected.once(magnitude_of) - policy.element_bound(expected, dtype)
    return float(excess.amax())


def magnitude_of(expected: Expected) -> torch.Tensor:
    """Absolute values of what is expected."""
    return expected.value.abs()


@dataclass(frozen=True)
class Exact(Elementwise):
    """Integers and booleans must be equal, element for element. Copies have a policy in `harness.copies`."""

    reason: str = "integers are exact"

    def compare(self, actual: torch.Tensor, expected: Expected) -> Comparison:
        value = expected.value
        if actual.shape != value.shape:
            return wrong_shape(actual, value)
        wrong = self.differs(actual, value).flatten()
        if not wrong.any():
            return Comparison(0.0)
        position = int(wrong.int().argmax())
        index = place(position, value.shape)
        detail = f"{int(wrong.sum())} of {value.numel()} elements differ"
        return Comparison(math.inf, math.inf, index, float(actual[index]), float(value[index]), 0.0, detail)

    def differs(self, actual: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Which elements are wrong."""
        return actual.double() != value.double()
