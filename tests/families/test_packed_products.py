"""Products of integers, packed weights and batches: how weights are packed, and how the real kernels are called."""

from __future__ import annotations

import pytest
import torch
from emulated_runs import assert_plans_pass, install
from emulated_tensor_core import truncating_product

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.gemm.fp4 import dequantized, value_of
from flashinfer_trace.families.gemm.int8 import original_order, reordered, unpacked
from flashinfer_trace.harness.inputs import Draws


def as_upstream_packs(weights):
    """QServe's order by the reshapes of its converter: facts of the layout, see the family's docstring."""
    n, k = weights.shape
    tiles = weights.view(n // 32, 2, 2, 8, k // 32, 2, 4, 4).permute(0, 4, 3, 6, 1, 5, 2, 7)
    halves = tiles.movedim(4, 7)
    return ((halves[..., 1] << 4) + halves[..., 0]).reshape(n, k // 2).to(torch.uint8).view(torch.int8)


def test_four_bit_weights_come_back():
    weights = Draws(0, "cpu").integers([96, 160], 0, 15, torch.int32)
    assert torch.equal(unpacked(as_upstream_packs(weights)).int(), weights)


def test_channels_come_back():
    values = torch.arange(2 * 64).view(2, 64)
    stored = reordered(values)
    assert stored[0, 4 * 5 + 2] == values[0, 8 * 2 + 5]
    assert torch.equal(original_order(stored).long(), values)


def test_all_numbers_of_e2m1():
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert value_of(torch.arange(16)).tolist() == numbers + [-number for number in numbers]


def test_block_scales_are_found_in_the_tiles_of_the_tensor_core():
    """The scale of row 128 + 32 + 7 and column 4 + 2 of 8 columns: tile 3, and (7, 1, 2) of [32, 4, 4] in it."""
    stored = torch.zeros(256, 8)
    stored.view(-1)[3 * 512 + 7 * 16 + 1 * 4 + 2] = 2
    ones = torch.full((200, 64), 0x22, dtype=torch.int8)
    values = dequantized(ones, stored.to(torch.float8_e4m3fn))
    assert values.nonzero().tolist() == [[167, 6 * 16 + column] for column in range(16)]
    assert float(values.max()) == 2


def fake_int8(a, b, a_scales, b_scales, dtype, bias=None):
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert bias is None
    return ((a.double() @ b.double()).float() * b_scales * a_scales.view(-1, 1)).to(dtype)


def fake_bmm(a, b, a_scale, b_scale, dtype, out=None):
    assert a.is_contiguous()
    assert b.transpose(1, 2).is_contiguous()
    assert a_scale.shape == b_scale.shape == (1,)
    assert a_scale.dtype == b_scale.dtype == torch.float32
    return out.copy_((truncating_product(a, b.mT).float() * (a_scale * b_scale)).to(dtype))


def fake_router(hidden, weights, out_dtype=torch.bfloat16):
    assert hidden.is_contiguous()
    assert weights.is_contiguous()
    return (hidden.float() @ weights.float().T).to(out_dtype)


def fake_tiny_gemm(x, w, out=None, *, out_dtype=None, n_split=None, max_m=16):
    assert x.is_contiguous() and w.is_contiguous() and len(x) <= max_m
    found = (x.float() @ w.float().T).to(out.dtype if out is not None else out_dtype or x.dtype)
    return found if out is None else out.copy_(found)


def fake_deep_gemm(a, b, d):
    d.copy_(a.float() @ b.float().T)


def fake_per_channel(a, b, w_scales, a_scales, w_szeros, a_sums, out):
    assert all(each.dtype == torch.float16 for each in (w_scales, a_scales, w_szeros, a_sums, out))
    product = (a.double() @ unpacked(b).T).float()
    scaled = product * a_scales.float()[:, None] * w_scales.float()
    return out.copy_((scaled - a_sums.float()[:, None] * w_szeros.float()).half())


def fake_per_group(a, b, zeros, scales, w_scales, a_scales, out):
    assert zeros.dtype == scales.dtype == torch.int8
    group = a.shape[1] // len(scales)
    levels = [original_order(each).T.repeat_interleave(group, dim=1) for each in (scales, zeros)]
    weights = unpacked(b) * levels[0] + levels[1]
    assert weights.abs().max() <= 128
    return out.copy_(((a.double() @ weights.T).float() * w_scales.float() * a_scales.float()[:, None]).half())


def fake_fp4(a, b, a_scales, b_scales, alpha, dtype):
    assert a.dtype == b.dtype == torch.uint8
    assert a_scales.dtype == b_scales.dtype == torch.float8_e4m3fn
    assert alpha.shape == (1,)
    assert alpha.dtype == torch.float32
    assert all(each.is_contiguous() for each in (a, b, a_scales, b_scales))
    rows, weights = (dequantized(packed, stored).float() for packed, stored in ((a, a_scales), (b, b_scales)))
    return ((rows @ weights.T) * alpha).to(dtype)


FAKES = {
    "sgl_kernel.int8_scaled_mm": fake_int8,
    "sglang.kernels.ops.gemm.bmm_fp8": fake_bmm,
    "sgl_kernel.dsv3_router_gemm": fake_router,
    "deep_gemm.bf16_gemm_nt": fake_deep_gemm,
    "sglang.kernels.ops.gemm.tiny_gemm.tiny_gemm_bf16": fake_tiny_gemm,
    "sgl_kernel.qserve_w4a8_per_chn_gemm": fake_per_channel,
    "sgl_kernel.qserve_w4a8_per_group_gemm": fake_per_group,
    "sgl_kernel.cutlass_scaled_fp4_mm": fake_fp4,
    "sglang.jit_kernel.nvfp4.cutlass_scaled_fp4_mm": fake_fp4,
}


@pytest.mark.parametrize(
    "name",
    [
        "int8_scaled_mm_n3072_k1536",
        "bmm_fp8_b16_n512_k128",
        "gemm_float32_out_n256_k7168",
        "qserve_w4a8_per_chn_gemm_n3072_k1536",
        "qserve_w4a8_per_group_gemm_n3072_k1536",
        "cutlass_scaled_fp4_mm_n512_k7168",
    ],
)
def test_kernels_are_called_as_their_libraries_want(name, monkeypatch):
    install(monkeypatch, FAKES)
    definition = flashinfer_trace.load(name)
    kernels = [kernel for kernel in family_of(definition).kernels_of(definition) if kernel.library != "torch"]
    assert kernels
    for kernel in kernels:
        assert_plans_pass(definition, kernel, *({"m": 5, "values": kind} for kind in ("normal", "positive", "large")))
