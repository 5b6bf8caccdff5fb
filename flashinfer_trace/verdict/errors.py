"""The errors of one output as a whole: their signs, and which elements are beyond their bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.compare import ErrorBound, Exact, Expected, Policy


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
