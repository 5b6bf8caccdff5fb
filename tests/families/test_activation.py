"""silu_and_mul: values by hand, the tails of the sigmoid, and an emulation of CUDA's fast arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.activation import FAST_SILU, KINDS, SILU
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.verify import prepare

pytestmark = pytest.mark.quick

DEFINITION = flashinfer_trace.load("silu_and_mul_i14336")
FAMILY = family_of(DEFINITION)
TWIN = prepare(DEFINITION, FAMILY, "cpu", full=False)


def case(kind, seed=3):
    plan = {"num_tokens": 24, "values": kind, "zero_half": "neither"}
    inputs = FAMILY.inputs(TWIN, plan, seed, "cpu")
    return inputs, FAMILY.oracle(TWIN, inputs)["output"]


def fast_kernel(gate_up, ulps):
    """x / (1 + exp(-x)) with exp wrong by `ulps` of (2 + 1.173 |x|) ulp, and quotients of 0 from 2^126 on."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    error = (2 + 1.173 * gate.abs()) * 2**-23 * ulps
    exponential = (torch.exp(-gate.double()) * (1 + error)).float()
    exponential = torch.where(exponential < 2**-126, 0.0, exponential)
    divisor = 1 + exponential
    silu = torch.where(divisor >= 2.0**126, -0.0, gate / divisor)
    return (silu * up).to(torch.bfloat16)


def test_values_by_hand():
    gate_up = torch.zeros(1, 8, dtype=torch.bfloat16)
    gate_up[0] = torch.tensor([0.0, 1.0, -1.0, 100.0, 3.0, 2.0, 2.0, -1.5])
    output = TWIN.with_const_axes({"intermediate_size": 4, "gate_up_size": 8}).run(gate_up)
    silu = 1 / (1 + math.exp(-1.0))
    expected = torch.tensor([[0.0, 2 * silu, -2 * (1 - silu), -150.0]]).to(torch.bfloat16)
    assert torch.equal(output, expected)


def test_gate_and_up_are_not_interchangeable():
    inputs, expected = case("normal")
    swapped = torch.cat(inputs["gate_up"].chunk(2, dim=-1)[::-1], dim=-1)
    output = reference_outputs(TWIN, {"gate_up": swapped}, 0)["output"]
    assert not SILU.compare(output, expected).passed
    assert not FAST_SILU.compare(output, expected).passed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ulps", [-1, 1])
def test_the_documented_errors_of_fast_arithmetic_are_within_the_kernels_bound(kind, ulps):
    inputs, expected = case(kind)
    comparison = FAST_SILU.compare(fast_kernel(inputs["gate_up"], ulps), expected)
    assert comparison.passed, str(comparison)


def test_rounding_silu_before_the_product_is_rejected():
    inputs, expected = case("normal")
    gate, up = inputs["gate_up"].chunk(2, dim=-1)
    output = torch.nn.functional.silu(gate) * up
    assert not FAST_SILU.compare(output, expected).passed


def test_a_silu_that_is_zero_too_early_is_rejected():
    """0 below -126 ln 2 is right; from -80 on it is not, though both are tiny."""
    gate, up = torch.linspace(-100, -70, 48, dtype=torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
    inputs = {"gate_up": torch.cat((gate, up)).unsqueeze(0)}
    expected = FAMILY.oracle(TWIN, inputs)["output"]
    exact = expected.value.to(torch.bfloat16)
    assert FAST_SILU.compare(torch.where(gate < -87.34, 0.0, exact), expected).passed
    assert not FAST_SILU.compare(torch.where(gate < -80, 0.0, exact), expected).passed


def test_the_oracle_agrees_with_mpmath_in_the_tails():
    mpmath = pytest.importorskip("mpmath")
    gates = torch.tensor([-120.0, -87.5, -20.0, -1.0078125, -1.0, -0.0078125, 0.0078125, 30.0, 120.0])
    gate_up = torch.zeros(1, 96, dtype=torch.bfloat16)
    gate_up[0, : len(gates)] = gates
    gate_up[0, 48:] = 1.0
    found = FAMILY.oracle(TWIN, {"gate_up": gate_up})["output"].value[0]
    for value, gate in zip(found.tolist(), gate_up[0, : len(gates)].tolist(), strict=False):
        with mpmath.workprec(200):
            exact = mpmath.mpf(gate) / (1 + mpmath.exp(-mpmath.mpf(gate)))
            assert abs(mpmath.mpf(value) - exact) <= abs(exact) * mpmath.mpf(2) ** -50


def test_sizes_that_the_kernels_cannot_load_are_refused():
    odd = TWIN.with_const_axes({"intermediate_size": 12, "gate_up_size": 24})
    assert FAMILY.kernels_of(odd) == []
    assert len(FAMILY.kernels_of(DEFINITION)) == 3
