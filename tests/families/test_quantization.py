"""Quantizers: their codes at ties and at the limits, and how the real kernels are called."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from emulated_runs import assert_plans_pass, install
from whole_dataset import FAMILIES

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.quantization import (
    CODES_E4M3,
    CODES_INT8,
    KINDS,
    SMALLEST_MAXIMUM,
    Rows,
    nearest_e4m3,
    quantized,
)
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.power import stand_in
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import Expected


def test_nearest_e4m3_is_the_conversion_of_torch():
    values = torch.cat([Draws(0, "cpu").normal([20000], scale=scale) for scale in (0.002, 0.1, 30.0, 300.0)])
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values
    values = torch.cat([values, every, (every[1:] + every[:-1]) / 2]).clamp(-448, 448)
    assert torch.equal(nearest_e4m3(values.double()).float(), values.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("codes", "passes"),
    [([96, 104, 448], True), ([104, 104, 448], True), ([96, 96, 448], False), ([96, 104, 416], False)],
)
def test_a_code_may_go_either_way_at_a_tie_and_nowhere_else(codes, passes):
    """100 is in the middle between 96 and 104."""
    quotients = torch.tensor([[100.0, 100.0 * (1 + 2**-20), 448.0]], dtype=torch.float64)
    actual = torch.tensor([codes]).float().to(torch.float8_e4m3fn)
    assert CODES_E4M3.compare(actual, Expected(quotients)).passed == passes


@pytest.mark.parametrize(
    ("codes", "passes"),
    [([3, -3, 127, -5], True), ([3, -3, 126, -4], True), ([4, -4, 127, -5], False), ([3, -3, 127, -6], False)],
)
def test_int8_codes_lose_their_fraction(codes, passes):
    quotients = torch.tensor([[3.7, -3.7, 127.0, -5.0]], dtype=torch.float64)
    assert CODES_INT8.compare(torch.tensor([codes], dtype=torch.int8), Expected(quotients)).passed == passes


def test_int8_codes_of_tokens_are_rounded_with_halves_away_from_zero():
    """With a maximum of 254, odd numbers are halves."""
    x = torch.tensor([[254.0, 3.0, -3.0, 4.0, 1.0, -1.0]], dtype=torch.bfloat16)
    definition = flashinfer_trace.load("per_token_quant_int8_h4096").with_const_axes({"hidden_size": 6})
    outputs = definition.name_outputs(definition.run(x=x))
    assert outputs["codes"].tolist() == [[127, 2, -2, 2, 1, -1]]
    assert outputs["scales"].tolist() == [2.0]


def int8_of(round_halves):
    """A kernel that is right but for how it treats halves, and its scales."""

    def call(definition, inputs, outputs):
        values = inputs["x"].float()
        scales = values.abs().amax(dim=1).clamp_min(SMALLEST_MAXIMUM) / 127
        return {"codes": round_halves(values / scales[:, None]).to(torch.int8), "scales": scales}

    return call


@pytest.mark.parametrize(
    ("round_halves", "status"),
    [
        (lambda y: torch.sign(y) * torch.floor(y.abs() + 0.5), "passed"),
        (torch.round, "failed"),
        (lambda y: torch.sign(y) * torch.ceil(y.abs() - 0.5), "failed"),
        (lambda y: torch.floor(y + 0.5), "failed"),
    ],
    ids=["away from zero", "to even", "toward zero", "up"],
)
def test_where_the_scale_is_a_power_of_two_halves_go_away_from_zero(round_halves, status):
    definition = flashinfer_trace.load("per_token_quant_int8_h4096")
    family = family_of(definition)
    kernel = dataclasses.replace(stand_in(None), call=int8_of(round_halves))
    assert verify(Job(definition, family, kernel), examples=0).status == status
    # A real kernel may divide approximately: of it both neighbors of a half are taken.
    of_kernels = dataclasses.replace(kernel, compare=family.kernels[0].compare)
    assert verify(Job(definition, family, of_kernels), examples=0).status == "passed"


@pytest.mark.parametrize("name", ["per_token_quant_fp8", "per_token_group_quant_fp8", "per_token_group_quant_int8"])
def test_of_kernels_both_codes_pass_where_approximate_quotients_reach_a_boundary(name):
    family = FAMILIES[name]
    value = torch.tensor([[100.0 if "fp8" in name else 50.0]], dtype=torch.float64)
    below = torch.tensor([[96.0 if "fp8" in name else 49.0]])
    above = torch.tensor([[104.0 if "fp8" in name else 50.0]])
    for exact in (True, False):
        expected = Expected(value, {"exact": torch.tensor([[exact]])})
        passed = [family.compare["codes"].compare(code, expected).passed for code in (below, above)]
        assert passed == ([True, not exact] if "fp8" in name else [not exact, True])
        for kernel in family.kernels:
            policy = family.policies(kernel)["codes"]
            assert all(policy.compare(code, expected).passed for code in (below, above))
            assert "power of two" not in policy.reason


@pytest.mark.parametrize("name", ["per_token_quant_int8_h4096", "per_token_group_quant_int8_h7168_g128"])
def test_codes_of_the_largest_values_that_bfloat16_has(name):
    """127 x is beyond float32."""
    definition = flashinfer_trace.load(name)
    x = torch.zeros(1, definition.const_axes["hidden_size"], dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([1.0, -1.0, 0.25]) * torch.finfo(torch.bfloat16).max
    codes, _ = definition.compiled(x)
    assert codes[0, :4].tolist() == [127, -127, 31 if "group" in name else 32, 0]


def test_groups_of_zeros_and_of_vanishing_values():
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    x[1, 32:] = 1e-11
    expected = quantized(x, 32, 448.0, SMALLEST_MAXIMUM)
    assert torch.equal(expected["scales"].value, torch.full((2, 2), 1e-10 / 448, dtype=torch.float64))
    assert float(expected["codes"].value[1, 40]) == pytest.approx(44.8, rel=0.01)
    assert float(expected["codes"].value[0].abs().max()) == 0


def test_a_kernel_without_rows_of_zeros_gets_none():
    definition = flashinfer_trace.load("per_token_quant_fp8_h512")
    family = family_of(definition)
    for zeros in (True, False):
        request = PlanRequest(definition, {}, False, Rows(zeros))
        assert any(plan["zero_row"] for plan in family.corners(request)) == zeros


def per_token(x, codes, scales):
    assert scales.shape == (len(x),)
    scales.copy_(x.float().abs().amax(dim=1) / 448)
    codes.copy_((x.float() * (1 / scales)[:, None]).clamp(-448, 448))


def by_powers(x, codes, scales, group, eps):
    assert scales.dtype == torch.int32
    assert scales.stride(0) == 1
    groups = x.float().view(len(x), -1, group)
    exponents = (groups.abs().amax(dim=2).clamp_min(eps) / 448).log2().ceil()
    codes.copy_((groups * torch.exp2(-exponents)[:, :, None]).view(x.shape))
    scales.copy_((exponents + 127).to(torch.uint8).view(torch.int32))


def per_group(x, codes, scales, group, eps, low, high, scale_ue8m0=False, fuse=False, masked=None, enable_v2=None):
    assert x.is_contiguous()
    assert codes.is_contiguous()
    assert scales.is_contiguous() or scales.stride() == (1, -(-len(x) // 4) * 4)
    assert eps == 1e-10
    if scale_ue8m0:
        return by_powers(x, codes, scales, group, eps)
    assert (low, high) == ((-448, 448) if codes.is_floating_point() else (-128, 127))
    groups = x.float().view(len(x), -1, group)
    largest = groups.abs().amax(dim=2).clamp_min(eps)
    scales.copy_(largest / high)
    factor = high / largest if enable_v2 else 1 / (largest / high)
    codes.copy_((groups * factor[:, :, None]).clamp(low, high).view(x.shape))


def triton_per_group(x, group_size, dtype=torch.int8, eps=1e-10):
    codes, scales = torch.empty_like(x, dtype=dtype), torch.empty(len(x), x.shape[1] // group_size)
    per_group(x, codes, scales, group_size, eps, *((-448, 448) if dtype.is_floating_point else (-128, 127)))
    return codes, scales


def triton_per_group_int8(x, group_size, eps=1e-10, dtype=torch.int8):
    return triton_per_group(x, group_size, dtype, eps)


def jit_per_group(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0=False):
    per_group(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0)


def per_token_group_quant(input, output_q=None, output_s=None, group_size=128, scale_ue8m0=False):
    limits = (-448, 448) if output_q.is_floating_point() else (-128, 127)
    per_group(input, output_q, output_s, group_size, 1e-10, *limits, scale_ue8m0)


def triton_per_token_int8(x):
    """CUDA's round() takes halves away from zero."""
    largest = x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-10)
    quotients = x.float() * (127 / largest)
    return (quotients.abs() + 0.5).floor().copysign(quotients).to(torch.int8), largest / 127


FAKES = {
    "sgl_kernel.sgl_per_token_quant_fp8": per_token,
    "sgl_kernel.sgl_per_token_group_quant_fp8": per_group,
    "sgl_kernel.sgl_per_token_group_quant_8bit": per_group,
    "sgl_kernel.sgl_per_token_group_quant_int8": per_group,
    "sglang.jit_kernel.per_token_group_quant_8bit.per_token_group_quant_8bit": jit_per_group,
    "sglang.srt.layers.quantization.fp8_kernel.per_token_group_quant_8bit": triton_per_group,
    "sglang.kernels.ops.quantization.int8_kernel.per_token_group_quant_int8": triton_per_group_int8,
    "sglang.kernels.ops.quantization.int8_kernel.per_token_quant_int8": triton_per_token_int8,
    "sglang.kernels.ops.quantization.per_token_group_quant.per_token_group_quant": per_token_group_quant,
    "sglang.kernels.ops.quantization.per_token_quant_fp8.per_token_quant_fp8": per_token,
}


@pytest.mark.parametrize(
    "name",
    [
        "per_token_quant_fp8_h512",
        "per_token_quant_int8_h4096",
        "per_token_group_quant_fp8_h512_g128",
        "per_token_group_quant_int8_h1536_g128",
        "per_token_group_quant_fp8_ue8m0_h512_g128",
    ],
)
def test_kernels_are_called_as_their_libraries_want(name, monkeypatch):
    install(monkeypatch, FAKES)
    definition = flashinfer_trace.load(name)
    for kernel in family_of(definition).kernels_of(definition):
        common = {"num_tokens": 5, "zero_row": kernel.plan_options is None}
        assert_plans_pass(definition, kernel, *({**common, "values": kind} for kind in KINDS))
