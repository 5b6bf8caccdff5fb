"""`ErrorBound` says of every output what a straightforward comparison, element by element, says of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_trace.verdict.compare import (
    Comparison,
    ErrorBound,
    Expected,
    correctly_rounded,
    norm_error,
    rounding_error,
    wrong_shape,
)


def bound(expected: Expected) -> torch.Tensor:
    """Zero for some elements, and one for each row where the case says so."""
    allowed = rounding_error(expected.value, torch.bfloat16) + expected.parts["slack"]
    return torch.where(expected.parts["copied"], 0.0, allowed)


def limit(expected: Expected) -> float:
    return float(expected.parts["limit"])


PLAIN = ErrorBound(bound, "one rounding")
WITH_GAIN = ErrorBound(bound, "one rounding", gain=limit)


def straightforward(policy: ErrorBound, actual: torch.Tensor, expected: Expected) -> Comparison:
    """As `ErrorBound.compare`, one figure after the other."""
    value = expected.value
    if actual.shape != value.shape:
        return wrong_shape(actual, value)
    if value.numel() == 0:
        return Comparison(0.0)
    computed = actual.double()
    if expected.exact:
        allowed = (correctly_rounded(value, actual.dtype) - value).abs()
    else:
        allowed = policy.bound(expected).expand_as(value)
    error = (computed - value).abs()
    ratio = torch.where(error == 0, 0.0, error / allowed)
    same_infinity = ~value.isfinite() & (computed == value)
    ratio = torch.where(same_infinity, 0.0, torch.where(value.isfinite() & computed.isfinite(), ratio, math.inf))
    worst = int(ratio.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), value.shape))
    figures = (float(computed[index]), float(value[index]), float(allowed[index]))
    comparison = Comparison(float(ratio.flatten()[worst]), norm_error(computed, value), index, *figures)
    return comparison if policy.gain is None else with_gain(comparison, computed, expected, policy.gain(expected))


def with_gain(comparison: Comparison, computed: torch.Tensor, expected: Expected, limit: float) -> Comparison:
    finite = expected.value.isfinite()
    value = torch.where(finite, expected.value, 0.0)
    size = (value * value).sum()
    if not comparison.passed or size == 0:
        return comparison
    gain = float((torch.where(finite, computed, 0.0) * value).sum() / size) - 1.0
    if abs(gain) / limit <= comparison.ratio:
        return comparison
    detail = f"gain is off by {gain:.2e}, bound {limit:.2e}"
    return Comparison(abs(gain) / limit, comparison.error, detail=detail)


def special(draw: st.DrawFn, tensor: torch.Tensor, values: list[float]) -> None:
    """Overwrites some elements."""
    for value in draw(st.lists(st.sampled_from(values), max_size=3)):
        if tensor.numel():
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = value


@st.composite
def outputs(draw: st.DrawFn) -> tuple[torch.Tensor, Expected]:
    """An output and what was expected of it: right, nearly right, or wrong in a few elements."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.sampled_from([(), (1,), (5,), (3, 4), (2, 3, 5), (0, 4), (40, 30)]))
    value = torch.randn(shape, generator=generator, dtype=torch.float64) * draw(st.sampled_from([1.0, 1e-6, 300.0]))
    exact = draw(st.booleans())
    if exact and draw(st.booleans()):
        value = value.round()
    if draw(st.booleans()):
        special(draw, value, [math.inf, -math.inf, 0.0, math.nan])
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    scale = draw(st.sampled_from([1.0, 1.0, 1.001, 1.01, 0.0]))
    actual = correctly_rounded(value * scale, dtype).to(dtype)
    if draw(st.booleans()):
        special(draw, actual, [math.inf, -math.inf, 0.0, math.nan, 1.0])
    if draw(st.integers(0, 9)) == 0:
        actual = actual.reshape(*shape, 1)
    rows = (*value.shape[:-1], 1) if value.ndim else ()
    parts = {
        "slack": torch.rand(rows, generator=generator, dtype=torch.float64) * draw(st.sampled_from([0.0, 1e-3, 1.0])),
        "copied": torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3])),
        "limit": torch.tensor(draw(st.sampled_from([1e-6, 1e-3, 0.5]))),
    }
    return actual, Expected(value, parts, exact)


@pytest.mark.parametrize("policy", [PLAIN, WITH_GAIN], ids=["plain", "gain"])
@given(case=outputs())
def test_every_figure_and_message_is_the_same(policy, case):
    """But what passes names no worst element, and its gain comes from a sum in another order."""
    actual, expected = case
    found = policy.compare(actual, expected)
    wanted = straightforward(policy, actual, expected)
    assert found.passed == wanted.passed
    if wanted.index and not wanted.passed:
        assert str(found) == str(wanted)
        assert [repr(figure) for figure in vars(found).values()] == [repr(figure) for figure in vars(wanted).values()]
    else:
        assert found.ratio == pytest.approx(wanted.ratio, rel=1e-6)
        assert repr(found.error) == repr(wanted.error)
        assert (found.index, found.detail) == ((), wanted.detail)
    again = policy.compare(actual, expected)
    assert repr(again) == repr(found), "what an earlier comparison computed is as good"


@pytest.mark.parametrize("policy", [PLAIN, WITH_GAIN], ids=["plain", "gain"])
@given(case=outputs())
def test_zeros_pass_where_the_comparison_says_so(policy, case):
    actual, expected = case
    zeros = torch.zeros(expected.value.shape, dtype=actual.dtype)
    assert policy.passes_zero(expected, actual.dtype) == straightforward(policy, zeros, expected).passed
