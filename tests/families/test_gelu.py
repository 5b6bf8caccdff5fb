"""gelu_and_mul: values by hand, the tails of the normal distribution, and an emulation of the kernels' 1 + erf."""

from __future__ import annotations

import math

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.activation import CANCELING_GELU, GELU, KINDS
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.verify import Job

DEFINITION = flashinfer_trace.load("gelu_and_mul_i2048")
FAMILY = family_of(DEFINITION)
TWIN = Job(DEFINITION, FAMILY).sized


def case(kind, seed=3):
    inputs = FAMILY.inputs(TWIN, {"num_tokens": 24, "values": kind, "zero_half": "neither"}, seed, "cpu")
    return inputs, FAMILY.oracle(TWIN, inputs)["output"]


def tail():
    """A row of gates from -6 to -2, where 1 + erf cancels, with ups of 1."""
    gate, up = torch.linspace(-6, -2, 48, dtype=torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
    inputs = {"gate_up": torch.cat((gate, up)).unsqueeze(0)}
    return inputs, FAMILY.oracle(TWIN, inputs)["output"]


def canceling_kernel(gate_up, ulps=0):
    """gate * 0.5 * (1 + erf(gate / sqrt(2))) * up in float32, with erf off by some ulp."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    erf = torch.erf(gate * torch.tensor(math.sqrt(0.5))) * (1 + ulps * 2**-24)
    return (gate * 0.5 * (1 + erf.clamp(-1, 1)) * up).to(torch.bfloat16)


def test_values_by_hand():
    gate_up = torch.tensor([[0.0, 1.0, -1.0, 100.0, 3.0, 2.0, 2.0, -1.5]]).bfloat16()
    output = TWIN.with_const_axes({"intermediate_size": 4, "gate_up_size": 8}).run(gate_up)
    below_one = 0.8413447460685429  # of the standard normal distribution
    expected = torch.tensor([[0.0, 2 * below_one, -2 * (1 - below_one), -150.0]]).bfloat16()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ulps", [-2, 0, 2])
def test_the_documented_errors_of_erf_are_within_the_kernels_bound(kind, ulps):
    inputs, expected = case(kind)
    comparison = CANCELING_GELU.compare(canceling_kernel(inputs["gate_up"], ulps), expected)
    assert comparison.passed, str(comparison)


def test_the_cancellation_of_the_kernels_is_no_excuse_for_the_reference():
    inputs, expected = tail()
    output = canceling_kernel(inputs["gate_up"])
    assert CANCELING_GELU.compare(output, expected).passed
    assert not GELU.compare(output, expected).passed
    assert GELU.compare(reference_outputs(TWIN, inputs, 0)["output"], expected).passed


def wrong_halves(gate, up):
    return torch.nn.functional.gelu(up) * gate


def rounded_before_the_product(gate, up):
    return torch.nn.functional.gelu(gate).bfloat16().float() * up


def by_tanh(gate, up):
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def by_a_sigmoid(gate, up):
    return gate * torch.sigmoid(1.702 * gate) * up


@pytest.mark.parametrize("policy", [GELU, CANCELING_GELU], ids=["reference", "kernel"])
@pytest.mark.parametrize("function", [wrong_halves, rounded_before_the_product, by_tanh, by_a_sigmoid])
def test_another_function_is_rejected(function, policy):
    inputs, expected = case("normal")
    gate, up = inputs["gate_up"].float().chunk(2, dim=-1)
    assert not policy.compare(function(gate, up).bfloat16(), expected).passed


def test_the_tanh_form_is_rejected_by_its_tail_alone():
    inputs, expected = tail()
    gate, up = inputs["gate_up"].float().chunk(2, dim=-1)
    assert not CANCELING_GELU.compare(by_tanh(gate, up).bfloat16(), expected).passed


def test_a_gelu_that_is_zero_too_early_is_rejected():
    """Below -5.5, 1 + erf may be 0 in float32; from there to -4.5 it must not be, although results are tiny."""
    inputs, expected = tail()
    gate, exact = inputs["gate_up"][:, :48], expected.value.bfloat16()
    assert CANCELING_GELU.compare(torch.where(gate < -5.5, 0.0, exact), expected).passed
    assert not CANCELING_GELU.compare(torch.where(gate < -4.5, 0.0, exact), expected).passed


def test_the_oracle_agrees_with_mpmath_in_the_tails():
    mpmath = pytest.importorskip("mpmath")
    gates = torch.tensor([-37.5, -14.5, -6.0, -2.0, -1.0078125, -1.0, -0.0078125, 0.0078125, 4.0, 120.0])
    gate_up = torch.zeros(1, 96, dtype=torch.bfloat16)
    gate_up[0, : len(gates)] = gates
    gate_up[0, 48:] = 1.0
    found = FAMILY.oracle(TWIN, {"gate_up": gate_up})["output"].value[0]
    for value, gate in zip(found.tolist(), gates.tolist(), strict=False):
        with mpmath.workprec(200):
            exact = gate * mpmath.erfc(-mpmath.mpf(gate) / mpmath.sqrt(2)) / 2
            assert abs(mpmath.mpf(value) - exact) <= abs(exact) * mpmath.mpf(2) ** -48
