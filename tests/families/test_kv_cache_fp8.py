"""DeepSeek's packed fp8 cache: rows are quantized and dequantized, and the real kernels are called as they want."""

from __future__ import annotations

import pytest
import torch
from emulated_runs import assert_kernel_passes, install

import flashinfer_trace
from flashinfer_trace.families import family_of, kv_cache
from flashinfer_trace.families.kv_cache import BFLOAT16_MAX, finite_codes
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws

QUANTIZE, DEQUANTIZE = (f"{name}_k_cache_ckv512_kpe64_g128" for name in ("quantize", "dequantize"))
FP8, BFLOAT16 = torch.float8_e4m3fn, torch.bfloat16
#: The twins' features, rotated features and features of a group.
CKV, KPE, GROUP = 96, 16, 32
BYTES = CKV + 4 * (CKV // GROUP) + 2 * KPE


def quantized_rows(k_nope, k_rope):
    """The Triton kernel's arithmetic, in rows of bytes; a group of zeros is NaN."""
    assert k_nope.dtype == k_rope.dtype == BFLOAT16
    assert k_nope.shape[1:] == (CKV,) and k_rope.shape == (len(k_nope), KPE)
    assert k_nope.stride(1) == k_rope.stride(1) == 1
    rows = torch.empty(len(k_nope), BYTES, dtype=torch.uint8)
    groups = k_nope.float().view(len(k_nope), CKV // GROUP, GROUP)
    scales = groups.abs().amax(dim=2) / 448
    codes = (groups * (1 / scales)[:, :, None]).clamp(-448, 448).flatten(1)
    rows[:, :CKV] = codes.to(FP8).view(torch.uint8)
    rows[:, CKV : -2 * KPE].view(torch.float32).copy_(scales)
    rows[:, -2 * KPE :].view(BFLOAT16).copy_(k_rope)
    return rows


def quantize_k_cache(cache_k):
    pages, page_size, heads, features = cache_k.shape
    assert (heads, features) == (1, CKV + KPE)
    flat = cache_k.view(-1, features)
    return quantized_rows(flat[:, :CKV], flat[:, CKV:]).view(FP8).view(pages, page_size, 1, BYTES)


def quantize_k_cache_separate(k_nope, k_rope, tile_size=128):
    """Its rows of codes and scales, and those of the rotated part, are tensors of their own."""
    rows = quantized_rows(k_nope, k_rope)
    nope, rope = (part.contiguous() for part in rows.tensor_split((BYTES - 2 * KPE,), dim=1))
    return nope.unsqueeze(1), rope.unsqueeze(1)


def dequantize_k_cache_paged_dsa(quant_k_cache, page_table_1_flattened, group_size=128):
    assert quant_k_cache.dtype == FP8 and quant_k_cache.shape[1:] == (1, BYTES)
    assert page_table_1_flattened.dtype == torch.int32 and page_table_1_flattened.ndim == 1
    rows = quant_k_cache.view(-1, BYTES).view(torch.uint8)[page_table_1_flattened.long()]
    scales = rows[:, CKV : -2 * KPE].view(torch.float32).repeat_interleave(GROUP, dim=1)
    ckv = rows[:, :CKV].view(FP8).float() * scales
    return torch.cat((ckv.to(BFLOAT16), rows[:, -2 * KPE :].view(BFLOAT16)), dim=1).unsqueeze(1)


STAND_INS = {
    f"{kv_cache.QUANTIZE}.quantize_k_cache": quantize_k_cache,
    f"{kv_cache.QUANTIZE}.quantize_k_cache_separate": quantize_k_cache_separate,
    f"{kv_cache.DEQUANTIZE}.dequantize_k_cache_paged_dsa": dequantize_k_cache_paged_dsa,
}


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        pytest.param(name, kernel, id=kernel.label)
        for name in (QUANTIZE, DEQUANTIZE)
        for kernel in family_of(flashinfer_trace.load(name)).kernels
    ],
)
def test_kernels_are_called_as_their_library_wants(name, kernel, monkeypatch):
    install(monkeypatch, STAND_INS)
    definition = flashinfer_trace.load(name)
    assert kernel.unsupported(definition) is None
    assert_kernel_passes(definition, kernel, real=10, as_on_gpu=True)


def test_kernels_get_no_group_of_zeros_and_the_reference_does():
    definition = flashinfer_trace.load(QUANTIZE)
    family = family_of(definition)
    for options in {kernel.plan_options for kernel in family.kernels} | {None}:
        plans = family.corners(PlanRequest(definition, {}, True, options or type(family.kernels[0].plan_options)()))
        assert any(plan["zero_group"] for plan in plans) == (options is None)


def test_only_a_reference_meets_subnormal_numbers():
    for name in (QUANTIZE, DEQUANTIZE):
        definition = flashinfer_trace.load(name)
        family = family_of(definition)
        options = family.kernels[0].plan_options
        for large in (True, False):
            corners = family.corners(PlanRequest(definition, {}, large, options))
            assert any(plan["values"] == "least" for plan in corners) is not large


def test_what_is_quantized_by_hand():
    """Groups of two: maxima of 448, of 0 and of the largest number, with a tie between the codes 96 and 104."""
    definition = flashinfer_trace.load(QUANTIZE)
    sizes = {"head_dim_ckv": 6, "head_dim_kpe": 1, "group_size": 2, "num_groups": 3}
    k_nope = torch.tensor([[-448.0, 100.0, 0.0, 0.0, BFLOAT16_MAX, -BFLOAT16_MAX]], dtype=BFLOAT16)
    k_rope = torch.tensor([[1.0]], dtype=BFLOAT16)
    codes, scales, copied = definition.with_const_axes(sizes).run(k_nope=k_nope, k_rope=k_rope)
    assert codes.tolist() == [[-448.0, 96.0, 0.0, 0.0, 448.0, -448.0]]
    assert scales[0, :2].tolist() == [1.0, 0.0]
    assert float(scales[0, 2]) == pytest.approx(BFLOAT16_MAX / 448, rel=2**-23)
    assert torch.equal(copied, k_rope) and copied.data_ptr() != k_rope.data_ptr()


def test_quantized_rows_are_those_that_are_dequantized():
    """Codes, scales and the rotated part, one after the other, are a row; most of a row comes back within a code."""
    quantize, dequantize = (flashinfer_trace.load(name) for name in (QUANTIZE, DEQUANTIZE))
    draws = Draws(0, "cpu")
    k_nope, k_rope = draws.normal([9, 512], BFLOAT16), draws.normal([9, 64], BFLOAT16)
    outputs = quantize.run(k_nope=k_nope, k_rope=k_rope)
    rows = torch.cat([part.view(torch.uint8) for part in outputs], dim=1).view(FP8)
    slots = torch.tensor([8, 0, 8, 3], dtype=torch.int32)
    keys = dequantize.compiled(rows, slots)
    assert torch.equal(keys[:, 512:], k_rope[slots])
    largest = k_nope[slots].float().abs().amax(dim=1, keepdim=True)
    assert bool(((keys[:, :512].float() - k_nope[slots].float()).abs() <= largest * 2**-4).all())
    assert torch.equal(keys[0], keys[2])


def test_an_unused_slot_is_nan_and_every_finite_code_is_drawn():
    definition = flashinfer_trace.load(DEQUANTIZE)
    family = family_of(definition)
    plan = {"num_tokens": 3, "num_slots": 4, "slots": "one", "values": "any"}
    inputs = family.inputs(definition, plan, 1, "cpu")
    assert len(set(inputs["slots"].tolist())) == 1
    finite = inputs["kv_cache"][:, :512].float().isfinite().all(dim=1)
    assert finite.sum() == 1 and bool(finite[inputs["slots"][0].long()])
    bytes_drawn = finite_codes(Draws(0, "cpu"), [4096]).view(torch.uint8)
    assert set(bytes_drawn.tolist()) == set(range(256)) - {0x7F, 0xFF}


@pytest.mark.parametrize("feature", [0, 511, 512, 575])
def test_one_wrong_feature_of_a_key_is_rejected(feature):
    """The next bf16 number of a product, and of a copy, is none that the bound allows."""
    definition = flashinfer_trace.load(DEQUANTIZE)
    family = family_of(definition)
    plan = {"num_tokens": 3, "num_slots": 4, "slots": "random", "values": "powers"}
    inputs = family.inputs(definition, plan, 1, "cpu")
    keys = definition.compiled(**inputs)
    expected = family.oracle(definition, inputs)["keys"]
    assert family.compare["keys"].compare(keys, expected).passed
    keys.view(torch.int16)[1, feature] += 1
    assert not family.compare["keys"].compare(keys, expected).passed
