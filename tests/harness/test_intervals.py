"""The policy of limits on each element, and on the gain of all."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.intervals import Interval

EXPECTED = Expected(torch.tensor([[1.0, -2.0, 4.0]], dtype=torch.float64))
BELOW = Interval(lambda expected: (expected.value - 0.5, expected.value), "may be half too low")


@pytest.mark.parametrize(
    ("actual", "ratio"),
    [([1.0, -2.0, 4.0], 1.0), ([0.75, -2.25, 3.75], 0.0), ([0.5, -2.5, 3.5], 1.0), ([0.75, -2.25, 4.25], 2.0)],
)
def test_the_ratio_is_the_distance_from_the_middle_over_half_the_width(actual, ratio):
    comparison = BELOW.compare(torch.tensor([actual]), EXPECTED)
    assert comparison.ratio == ratio
    assert comparison.passed == (ratio <= 1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(wrong):
    comparison = BELOW.compare(torch.tensor([[1.0, wrong, 4.0]]), EXPECTED)
    assert comparison.ratio == math.inf
    assert comparison.index == (0, 1)


def test_limits_without_width_are_exact():
    exact = Interval(lambda expected: (expected.value, expected.value), "exact")
    assert exact.compare(torch.tensor([[1.0, -2.0, 4.0]]), EXPECTED).ratio == 0
    assert exact.compare(torch.tensor([[1.0, -2.0, 4.001]]), EXPECTED).ratio == math.inf


def test_a_wrong_shape_fails_and_nothing_passes():
    assert not BELOW.compare(torch.zeros(3), EXPECTED).passed
    nothing = Expected(torch.zeros(0, 3, dtype=torch.float64))
    assert BELOW.compare(torch.zeros(0, 3), nothing).passed


def test_the_gain_shows_what_single_elements_hide():
    def limits(expected):
        return expected.value - 1, expected.value + 1

    wide = Interval(limits, "wide", gain=lambda expected: (-0.02, 0.01))
    actual = EXPECTED.value.float()
    assert wide.compare(actual * 0.99, EXPECTED).passed
    comparison = wide.compare(actual * 1.02, EXPECTED)
    assert comparison.ratio == pytest.approx(0.025 / 0.015, rel=1e-4)
    assert "gain is off by 2.00e-02" in comparison.detail
    assert not wide.compare(actual * 0.97, EXPECTED).passed
