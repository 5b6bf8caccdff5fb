"""The comparison policies themselves: rounding, sums, infinities, NaN, exactness, gain."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_trace.verdict.compare import (
    ErrorBound,
    Exact,
    Expected,
    correctly_rounded,
    rounding_error,
    summation_error,
    unit_roundoff,
)
from flashinfer_trace.verdict.wrong_outputs import MUTANTS

pytestmark = pytest.mark.quick

BF16 = ErrorBound(lambda e: rounding_error(e.value, torch.bfloat16), "one rounding to bf16")


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest number of `dtype` to `value`, ties to even, by exact rational arithmetic."""
    info = torch.finfo(dtype)
    digits = round(-math.log2(info.eps)) + 1
    smallest_exponent = round(math.log2(info.smallest_normal))
    _, exponent = math.frexp(abs(value))
    quantum = Fraction(2) ** (max(exponent - 1, smallest_exponent) - digits + 1)
    return float(round(Fraction(value) / quantum) * quantum)  # Fraction rounds half to even


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(value=st.floats(-60000, 60000, allow_subnormal=False))
def test_correctly_rounded_rounds_once(dtype, value):
    assert correctly_rounded(torch.tensor([value], dtype=torch.float64), dtype).item() == nearest(value, dtype)


def test_correctly_rounded_where_rounding_twice_is_wrong():
    # Just above the middle of two bf16 numbers: float32 drops the excess and the tie then goes to even, downwards.
    value = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert value.bfloat16().item() == 1.0
    assert correctly_rounded(value, torch.bfloat16).item() == 1 + 2**-7


@given(st.floats(1e-30, 1e30))
def test_rounding_error_bounds_a_rounding(value):
    exact = torch.tensor([value], dtype=torch.float64)
    error = (correctly_rounded(exact, torch.bfloat16) - exact).abs()
    assert error <= rounding_error(exact, torch.bfloat16)


def test_summation_error_holds_and_is_far_below_the_worst_case():
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(200, 7168, generator=generator)
    magnitude = terms.double().abs().sum(1)
    running = torch.zeros(200)
    for column in terms.T:
        running = running + column
    error = (running.double() - terms.double().sum(1)).abs()
    bound = summation_error(magnitude, 7168)
    assert (error <= bound).all()
    assert (bound < 7168 * unit_roundoff(torch.float32) * magnitude / 5).all()


def test_error_bound_names_the_worst_element():
    expected = Expected(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    actual = expected.value.bfloat16()
    assert BF16.compare(actual, expected).passed
    actual[1, 0] = 3.5
    comparison = BF16.compare(actual, expected)
    assert not comparison.passed
    assert comparison.index == (1, 0)
    assert (comparison.actual, comparison.expected) == (3.5, 3.0)
    assert "at [1, 0]: got 3.5, expected 3" in str(comparison)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_where_finite_is_expected(wrong):
    expected = Expected(torch.tensor([1.0, 2.0], dtype=torch.float64))
    actual = torch.tensor([1.0, wrong]).bfloat16()
    assert BF16.compare(actual, expected).ratio == math.inf


def test_infinities_must_match_in_sign():
    expected = Expected(torch.tensor([-math.inf, 1.0], dtype=torch.float64))
    assert BF16.compare(torch.tensor([-math.inf, 1.0]).bfloat16(), expected).passed
    assert BF16.compare(torch.tensor([math.inf, 1.0]).bfloat16(), expected).ratio == math.inf
    assert BF16.compare(torch.tensor([-5e4, 1.0]).bfloat16(), expected).ratio == math.inf


@pytest.mark.parametrize("policy", [BF16, Exact()])
def test_wrong_shape_fails_and_says_so(policy):
    comparison = policy.compare(torch.ones(2, 3), Expected(torch.ones(3, 2, dtype=torch.float64)))
    assert not comparison.passed
    assert "shape [2, 3], expected [3, 2]" in comparison.detail


def test_exact_inputs_demand_the_correctly_rounded_value():
    expected = Expected(torch.tensor([257.0, 4.0], dtype=torch.float64), exact=True)  # 257 lies between 256 and 258
    wide = ErrorBound(lambda e: torch.full_like(e.value, 100.0), "wide")
    assert wide.compare(torch.tensor([256.0, 4.0]).bfloat16(), expected).passed
    assert not wide.compare(torch.tensor([260.0, 4.0]).bfloat16(), expected).passed
    assert not wide.compare(torch.tensor([256.0, 4.0625]).bfloat16(), expected).passed


def test_gain_shows_a_scale_that_the_elements_hide():
    value = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    policy = ErrorBound(lambda e: torch.full_like(e.value, 0.5), "wide", gain=lambda e: 0.005)
    assert policy.compare(value.float(), Expected(value)).passed
    comparison = policy.compare((value * 1.01).float(), Expected(value))
    assert not comparison.passed
    assert "gain is off by 1.00e-02" in comparison.detail


@pytest.mark.parametrize(("gain", "tells"), [(None, True), (0.005, True), (0.02, False)])
def test_a_scale_is_no_mutant_where_the_gain_allows_for_as_much(gain, tells):
    policy = ErrorBound(lambda e: e.value, "wide", gain=None if gain is None else lambda e: gain)
    names = [mutant.name for mutant in policy.mutants(Expected(torch.ones(3, dtype=torch.float64)))]
    assert ("scaled by 1.01" in names) == tells
    assert {"zero", "stale", "two rows swapped", "shifted by one", "NaN in one element"} < {*names, "scaled by 1.01"}


def test_mutants_that_are_not_wrong_do_not_apply():
    output = torch.tensor([[3, 3], [3, 3]])
    applied = {mutant.name: mutant.applied(output, output) for mutant in MUTANTS}
    assert {name for name, wrong in applied.items() if wrong is not None} == {"zero"}


def test_exact_counts_what_differs():
    comparison = Exact().compare(torch.tensor([1, 2, 4]), Expected(torch.tensor([1, 3, 5])))
    assert not comparison.passed
    assert comparison.index == (1,)
    assert "2 of 3 elements differ" in comparison.detail
    assert Exact().compare(torch.tensor([1, 2]), Expected(torch.tensor([1, 2]))).ratio == 0
