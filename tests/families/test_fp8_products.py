"""Products of fp8 codes: what a truncating tensor core does to them, and how the real kernels are called."""

from __future__ import annotations

import pytest
import torch
from emulated_runs import assert_plans_pass, install
from emulated_tensor_core import truncating_product

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.gemm.fp8 import KINDS, codes, columns_first, expected_product
from flashinfer_trace.families.gemm.truncation import TRUNCATED
from flashinfer_trace.harness.inputs import Draws

#: Loss of all-positive sums that was measured on an H200, by length.
MEASURED = {512: 0.005, 2048: 0.031, 8192: 0.13, 16384: 0.25}


def product_case(kind, k, m=8, n=24):
    draws = Draws(k, "cpu")
    a, b = codes(draws, [m, k], kind), codes(draws, [n, k], kind)
    return a, b, expected_product(a, b, torch.full((m, n), 2.0**-6, dtype=torch.float64))


@pytest.mark.parametrize(("k", "loss"), MEASURED.items())
def test_the_loss_of_positive_sums_is_the_one_that_was_measured(k, loss):
    a, b, expected = product_case("positive", k)
    low, high = TRUNCATED.limits(expected)
    emulated = 1 - float((truncating_product(a, b) / (a.double() @ b.double().T)).mean())
    # The measured figures have one to three digits: half a unit of the last one of 0.005 is 10 %.
    assert emulated == pytest.approx(loss, rel=0.15)
    measured = expected.value * (1 - loss)
    assert ((low < measured) & (measured < high)).all()
    assert (expected.value * 1.01 > high).all(), "cutting off toward zero makes no positive sum larger"
    assert (low > expected.value * 0.6).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 2048])
def test_a_truncating_accumulator_passes_and_one_of_fewer_bits_does_not(kind, k):
    a, b, expected = product_case(kind, k)
    scale = 2.0**-6
    assert TRUNCATED.compare((truncating_product(a, b) * scale).to(torch.bfloat16), expected).passed
    coarse = truncating_product(a, b, kept_bits=4) * scale
    assert not TRUNCATED.compare(coarse.to(torch.bfloat16), expected).passed
    assert not TRUNCATED.compare((expected.value * 0.98).to(torch.bfloat16), expected).passed or kind == "positive"


def test_integer_codes_lose_nothing():
    _, _, expected = product_case("integers", 2048)
    assert expected.exact
    assert float(expected.parts["most_lost"].max()) == float(expected.parts["most_gained"].max()) == 0


def test_columns_first_also_with_one_row():
    for rows in (1, 3, 8):
        matrix = torch.arange(rows * 5.0).view(rows, 5)
        for alignment in (1, 4):
            moved = columns_first(matrix, alignment)
            assert torch.equal(moved, matrix)
            assert moved.stride() == (1, -(-rows // alignment) * alignment)


def blockwise(a, b, a_scales, b_scales):
    """The blocks' products in the emulated tensor core, scaled and added up in float32."""
    total = torch.zeros(len(a), len(b))
    for block in range(a.shape[1] // 128):
        part = slice(128 * block, 128 * (block + 1))
        scale = torch.outer(a_scales[:, block], b_scales[:, block].repeat_interleave(128)[: len(b)])
        total += truncating_product(a[:, part], b[:, part]).float() * scale
    return total.to(torch.bfloat16)


def fake_sgl_blockwise(a, b, a_scales, b_scales, dtype):
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert a_scales.stride(0) == b_scales.stride(0) == 1
    assert dtype == torch.bfloat16
    return blockwise(a, b.t(), a_scales, b_scales.t())


def fake_sgl_scaled(a, b, a_scales, b_scales, dtype, bias=None):
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert a_scales.numel() == len(a)
    assert b_scales.numel() == b.shape[1]
    assert bias is None
    return (truncating_product(a, b.t()).float() * b_scales * a_scales.view(-1, 1)).to(dtype)


def fake_deep_gemm(lhs, rhs, out):
    (a, a_scales), (b, b_scales) = lhs, rhs
    assert a_scales.stride(0) == 1
    assert a_scales.stride(1) % 4 == 0
    assert b.is_contiguous()
    assert b_scales.is_contiguous()
    out.copy_(blockwise(a, b, a_scales, b_scales))


def fake_triton(a, b, a_scales, b_scales, block_size, output_dtype=torch.float16):
    assert block_size == [128, 128]
    assert a_scales.shape == (len(a), a.shape[1] // 128)
    assert b.is_contiguous()
    return blockwise(a, b, a_scales, b_scales).to(output_dtype)


FAKES = {
    "sgl_kernel.fp8_blockwise_scaled_mm": fake_sgl_blockwise,
    "sgl_kernel.fp8_scaled_mm": fake_sgl_scaled,
    "deep_gemm.fp8_gemm_nt": fake_deep_gemm,
    "sglang.kernels.ops.gemm.fp8_kernel.w8a8_block_fp8_matmul_triton": fake_triton,
}


@pytest.mark.parametrize("name", ["fp8_blockwise_scaled_mm_n4096_k512", "fp8_scaled_mm_n3072_k1536"])
@pytest.mark.parametrize("rows", [1, 6])
def test_kernels_are_called_as_their_libraries_want(name, rows, monkeypatch):
    install(monkeypatch, FAKES)
    definition = flashinfer_trace.load(name)
    for kernel in family_of(definition).kernels_of(definition):
        assert_plans_pass(definition, kernel, *({"m": rows, "values": kind} for kind in KINDS))
