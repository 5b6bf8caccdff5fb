"""Building blocks for fp8 blocks and routing."""

from __future__ import annotations

import pytest
import torch

from flashinfer_trace.families.quantized import (
    CODE_SIGMA,
    blockwise_product,
    chosen_by_rank,
    dequantized,
    e4m3_variance,
    float_variance,
    normal_codes,
    quantize_groups,
    varied_scales,
)
from flashinfer_trace.harness.inputs import Draws


def test_codes_are_close_to_normal_and_repeat():
    codes = normal_codes(Draws(5, "cpu"), [4, 128, 256])
    values = codes.float()
    assert not values.isnan().any()
    assert abs(float(values.mean())) < 0.02 * CODE_SIGMA
    assert float(values.std()) == pytest.approx(CODE_SIGMA, rel=0.02)
    again, other = normal_codes(Draws(5, "cpu"), [4, 128, 256]), normal_codes(Draws(6, "cpu"), [4, 128, 256])
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert not torch.equal(codes.view(torch.uint8), other.view(torch.uint8))


def test_quantized_groups_come_back_within_half_a_spacing():
    values = Draws(0, "cpu").normal([7, 384])
    values[3] = 0
    codes, scales = quantize_groups(values)
    assert scales.shape == (7, 3)
    back = codes.float() * scales.repeat_interleave(128, dim=1)
    half = (e4m3_variance(values.double()) * 3).sqrt()
    assert ((back - values).abs() <= half * (1 + 1e-5)).all()
    assert back.abs().amax() == pytest.approx(float(values.abs().amax()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float_variance_is_that_of_rounding(dtype):
    values = Draws(1, "cpu").normal([200, 500], scale=1e-5 if dtype is torch.float16 else 1.0).double()
    error = values - values.to(dtype).double()
    assert float(error.square().mean() / float_variance(values, dtype).mean()) == pytest.approx(1, rel=0.02)


def test_e4m3_variance_is_that_of_rounding():
    values = Draws(2, "cpu").normal([400, 512])
    codes, scales = quantize_groups(values)
    error = codes.double() * scales.double().repeat_interleave(128, dim=1) - values
    ratio = float(error.square().mean() / e4m3_variance(values.double()).mean())
    assert 0.9 < ratio <= 1.01  # values are taken a little larger on purpose


def test_blockwise_product_is_the_product_of_dequantized_matrices():
    draws = Draws(3, "cpu")
    weights, weight_scales = normal_codes(draws, [256, 384]), varied_scales(draws, [2, 3], 0.01)
    x, x_scales = normal_codes(draws, [5, 384]).double(), varied_scales(draws, [5, 3], 0.1)
    full = dequantized(weights, weight_scales, torch.float64)
    expected = (x * x_scales.double().repeat_interleave(128, dim=1)) @ full.T
    torch.testing.assert_close(blockwise_product(x, x_scales, weights, weight_scales), expected)
    torch.testing.assert_close(blockwise_product(x, None, weights, weight_scales), x @ full.T)
    assert full[130, 260] == weights[130, 260].double() * weight_scales[1, 2].double()


def test_rank_counting_agrees_with_a_stable_sort():
    scores = Draws(4, "cpu").integers([50, 3, 32], 0, 5).double()
    order = scores.argsort(dim=2, descending=True, stable=True)[:, :, :7]
    expected = torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, order, True)
    assert torch.equal(chosen_by_rank(scores, 7), expected)
