"""silu_and_mul, gelu_and_mul: values by hand, the tails of the functions, and emulations of kernels' arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import gelu, silu

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.families.activation import CANCELING_GELU, FAST_SILU, GELU, KINDS, SILU
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.verify import prepare
from flashinfer_trace.verdict.compare import Policy

pytestmark = pytest.mark.quick


def fast_silu(gate, ulps):
    """x / (1 + exp(-x)) with exp wrong by `ulps` of (2 + 1.173 |x|) ulp, and quotients of 0 at 2^126 and above."""
    error = (2 + 1.173 * gate.abs()) * 2**-23 * ulps
    exponential = (torch.exp(-gate.double()) * (1 + error)).float()
    divisor = 1 + torch.where(exponential < 2**-126, 0.0, exponential)
    return torch.where(divisor >= 2.0**126, -0.0, gate / divisor)


def canceling_gelu(gate, ulps=0):
    """gate * 0.5 * (1 + erf(gate / sqrt(2))) in float32, with erf off by some ulp."""
    erf = torch.erf(gate * torch.tensor(math.sqrt(0.5))) * (1 + ulps * 2**-24)
    return gate * 0.5 * (1 + erf.clamp(-1, 1))


class Activation(NamedTuple):
    """A Definition, its policies for the reference and for kernels, and what its tests need."""

    name: str
    reference: Policy
    kernels: Policy
    emulated: Callable[[Any, float], Any]
    errors: tuple[float, ...]
    #: The share of 1 that is left of it.
    of_one: float
    #: Gates of the tail; below the first of these two it may be 0, and below the second it may not.
    tail: tuple[float, float]
    zero: tuple[float, float]
    gates: tuple[float, ...]
    exact: Callable[[Any, Any], Any]

    @property
    def family(self):
        return family_of(flashinfer_trace.load(self.name))

    @property
    def twin(self):
        return prepare(flashinfer_trace.load(self.name), self.family, "cpu", full=False)

    def expected(self, inputs):
        return self.family.oracle(self.twin, inputs)["output"]

    def case(self, kind):
        plan = {"num_tokens": 24, "values": kind, "zero_half": "neither"}
        inputs = self.family.inputs(self.twin, plan, 3, "cpu")
        return inputs, self.expected(inputs)

    def of_tail(self):
        """A row of gates of the tail, with ups of 1."""
        gate, up = torch.linspace(*self.tail, 48, dtype=torch.bfloat16), torch.ones(48, dtype=torch.bfloat16)
        inputs = {"gate_up": torch.cat((gate, up)).unsqueeze(0)}
        return inputs, self.expected(inputs)


CASES = {
    "silu": Activation(
        "silu_and_mul_i14336", SILU, FAST_SILU, fast_silu, (-1, 1), 1 / (1 + math.exp(-1.0)), (-100, -70),
        (-87.34, -80), (-120.0, -87.5, -20.0, -1.0078125, -1.0, -0.0078125, 0.0078125, 30.0, 120.0),
        lambda mpmath, gate: gate / (1 + mpmath.exp(-gate)),
    ),
    "gelu": Activation(
        "gelu_and_mul_i2048", GELU, CANCELING_GELU, canceling_gelu, (-2, 0, 2), 0.8413447460685429, (-6, -2),
        (-5.5, -4.5), (-37.5, -14.5, -6.0, -2.0, -1.0078125, -1.0, -0.0078125, 0.0078125, 4.0, 120.0),
        lambda mpmath, gate: gate * mpmath.erfc(-gate / mpmath.sqrt(2)) / 2,
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("one", CASES.values(), ids=CASES)


def applied(function, gate_up):
    """function(gate, up) in float32, rounded once."""
    return function(*gate_up.float().chunk(2, dim=-1)).bfloat16()


@EACH
def test_values_by_hand(one):
    gate_up = torch.tensor([[0.0, 1.0, -1.0, 100.0, 3.0, 2.0, 2.0, -1.5]]).bfloat16()
    output = one.twin.with_const_axes({"intermediate_size": 4, "gate_up_size": 8}).run(gate_up)
    assert torch.equal(output, torch.tensor([[0.0, 2 * one.of_one, -2 * (1 - one.of_one), -150.0]]).bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_the_documented_errors_of_kernels_are_within_their_bound(one, kind):
    inputs, expected = one.case(kind)
    for error in one.errors:
        output = applied(lambda gate, up, error=error: one.emulated(gate, error) * up, inputs["gate_up"])
        comparison = one.kernels.compare(output, expected)
        assert comparison.passed, str(comparison)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", lambda gate, up: gate * silu(up)),
        ("silu", lambda gate, up: silu(gate).bfloat16().float() * up),
        ("gelu", lambda gate, up: gate * gelu(up)),
        ("gelu", lambda gate, up: gelu(gate).bfloat16().float() * up),
        ("gelu", lambda gate, up: gelu(gate, approximate="tanh") * up),
        ("gelu", lambda gate, up: gate * torch.sigmoid(1.702 * gate) * up),
    ],
    ids=["silu of up", "rounded silu", "gelu of up", "rounded gelu", "gelu by tanh", "gelu by a sigmoid"],
)
def test_another_function_is_rejected(name, function):
    inputs, expected = CASES[name].case("normal")
    output = applied(function, inputs["gate_up"])
    assert not CASES[name].reference.compare(output, expected).passed
    assert not CASES[name].kernels.compare(output, expected).passed


@EACH
def test_a_function_that_is_zero_too_early_is_rejected(one):
    """0 below -126 ln 2 is right for silu, and below -5.5 for 1 + erf in float32; above it is not, although results are
    tiny."""
    inputs, expected = one.of_tail()
    gate, exact = inputs["gate_up"][:, :48], expected.value.bfloat16()
    right, wrong = (torch.where(gate < end, 0.0, exact) for end in one.zero)
    assert one.kernels.compare(right, expected).passed
    assert not one.kernels.compare(wrong, expected).passed


@EACH
def test_the_oracle_agrees_with_mpmath_in_the_tails(one):
    mpmath = pytest.importorskip("mpmath")
    gate_up = torch.zeros(1, 96, dtype=torch.bfloat16)
    gate_up[0, : len(one.gates)], gate_up[0, 48:] = torch.tensor(one.gates), 1.0
    for value, gate in zip(one.expected({"gate_up": gate_up}).value[0].tolist(), one.gates, strict=False):
        with mpmath.workprec(200):
            exact = one.exact(mpmath, mpmath.mpf(float(torch.tensor(gate).bfloat16())))
            assert abs(mpmath.mpf(value) - exact) <= abs(exact) * mpmath.mpf(2) ** (
                -50 if one.reference is SILU else -48
            )


def test_the_cancellation_of_the_kernels_is_no_excuse_for_the_reference():
    inputs, expected = CASES["gelu"].of_tail()
    output = applied(lambda gate, up: canceling_gelu(gate) * up, inputs["gate_up"])
    assert CANCELING_GELU.compare(output, expected).passed
    assert not GELU.compare(output, expected).passed
    assert GELU.compare(reference_outputs(CASES["gelu"].twin, inputs, 0)["output"], expected).passed


def test_the_tanh_form_is_rejected_by_its_tail_alone():
    inputs, expected = CASES["gelu"].of_tail()
    output = applied(lambda gate, up: gelu(gate, approximate="tanh") * up, inputs["gate_up"])
    assert not CANCELING_GELU.compare(output, expected).passed


def test_sizes_that_the_kernels_cannot_load_are_refused():
    one = CASES["silu"]
    odd = one.twin.with_const_axes({"intermediate_size": 12, "gate_up_size": 24})
    assert one.family.kernels_of(odd) == []
    assert len(one.family.kernels_of(flashinfer_trace.load(one.name))) == 3
