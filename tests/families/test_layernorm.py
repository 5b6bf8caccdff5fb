"""LayerNorm: values computed by hand, rows with a large mean, and an emulation of the kernel's two passes."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from drawn_plans import small_twin

from flashinfer_trace.families.layernorm import NORMALIZED, OFFSETS, summed_exactly
from flashinfer_trace.harness.case import reference_outputs, vacuity
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS

pytestmark = pytest.mark.quick

FAMILY, TWIN = small_twin("layernorm_h128")
EPS = 1e-6


def case(values="normal", offset=0.0, seed=3, definition=TWIN):
    inputs = FAMILY.inputs(definition, {"batch_size": 12, "values": values, "offset": offset}, seed, "cpu")
    return inputs, FAMILY.oracle(definition, inputs)["output"]


def kernel(inputs, variance=lambda x, mean: (x - mean).square(), ulps=0):
    """The kernel in float32: sequential sums, and a reciprocal root that is off by some ulp."""
    x = inputs["hidden_states"].float()
    n = x.shape[1]

    def total(terms):
        running = torch.zeros(len(terms))
        for column in terms.T:
            running = running + column
        return running.unsqueeze(1)

    mean = total(x) / n
    root = torch.rsqrt(total(variance(x, mean)) / n + EPS) * (1 + ulps * 2**-23)
    return ((x - mean) * root * inputs["weight"] + inputs["bias"]).to(torch.bfloat16)


def test_values_by_hand():
    definition = TWIN.with_const_axes({"hidden_size": 4})
    x = torch.tensor([[1.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]]).bfloat16()
    weight, bias = torch.tensor([1.0, 2.0, 4.0, -8.0]), torch.tensor([0.5, 0.0, -1.0, 1.0])
    root = 1 / math.sqrt(1 + EPS)
    expected = torch.stack((torch.tensor([-1.0, 2.0, -4.0, -8.0]) * root + bias, bias, bias)).bfloat16()
    assert torch.equal(definition.run(x, weight, bias), expected)


@pytest.mark.parametrize("values", VALUE_KINDS)
@pytest.mark.parametrize("offset", sorted(set(OFFSETS)))
@pytest.mark.parametrize("ulps", [-2, 2])
def test_the_kernels_arithmetic_is_within_the_bound(values, offset, ulps):
    inputs, expected = case(values, offset)
    comparison = NORMALIZED.compare(kernel(inputs, ulps=ulps), expected)
    assert comparison.passed, str(comparison)


def test_the_oracle_agrees_with_exact_fractions():
    inputs, expected = case("normal", 30.0)
    for row, found in zip(inputs["hidden_states"][:3].tolist(), expected.value[:3].tolist(), strict=True):
        x = [Fraction(value) for value in row]
        mean = sum(x) / len(x)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in x) / len(x) + Fraction(EPS))
        parameters = zip(x, inputs["weight"].tolist(), inputs["bias"].tolist(), strict=True)
        exact = [float(value - mean) / deviation * weight + bias for value, weight, bias in parameters]
        assert found == pytest.approx(exact, rel=1e-11, abs=1e-11)


def clamped(name, limit):
    return lambda inputs: {**inputs, name: inputs[name].clamp(-limit, limit)}


def flushed(name, least):
    return lambda inputs: {**inputs, name: inputs[name].masked_fill(inputs[name].abs() < least, 0)}


@pytest.mark.parametrize(
    "change",
    [
        *[clamped("weight", 1000.0), clamped("bias", 1000.0), clamped("hidden_states", 60000.0)],
        *[flushed("weight", 1e-5), flushed("bias", 1e-5)],
    ],
    ids=["large weights", "large biases", "large activations", "small weights", "small biases"],
)
def test_corners_reject_parameters_that_a_narrower_range_changes(change):
    passed = []
    for number, plan in enumerate(FAMILY.corners(PlanRequest(TWIN, {}, False, None))):
        inputs = FAMILY.inputs(TWIN, plan, number, "cpu")
        passed.append(NORMALIZED.compare(kernel(change(inputs)), FAMILY.oracle(TWIN, inputs)["output"]).passed)
    assert len(passed) == 5 and not all(passed)


def without(name, value):
    return lambda inputs: {**inputs, name: torch.full_like(inputs[name], value)}


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("change", [without("weight", 1.0), without("bias", 0.0)], ids=["weight", "bias"])
def test_forgotten_parameters_are_rejected(change, offset):
    inputs, expected = case(offset=offset)
    output = reference_outputs(TWIN, change(inputs), 0)["output"]
    assert not NORMALIZED.compare(output, expected).passed


@pytest.mark.parametrize(
    "variance",
    [lambda x, mean: x.square(), lambda x, mean: (x - mean).square() * 64 / 63],
    ids=["second moment", "Bessel's correction"],
)
def test_another_variance_is_rejected(variance):
    inputs, expected = case(offset=30.0)
    assert NORMALIZED.compare(kernel(inputs), expected).passed
    assert not NORMALIZED.compare(kernel(inputs, variance), expected).passed


def test_a_mean_that_is_not_subtracted_is_rejected():
    inputs, expected = case()
    x = inputs["hidden_states"].float()
    output = x * torch.rsqrt(x.var(dim=1, correction=0, keepdim=True) + EPS) * inputs["weight"] + inputs["bias"]
    assert not NORMALIZED.compare(output.bfloat16(), expected).passed


def test_rounding_before_the_bias_is_rejected():
    inputs, expected = case()
    no_bias = reference_outputs(TWIN, {**inputs, "bias": torch.zeros_like(inputs["bias"])}, 0)["output"]
    assert not NORMALIZED.compare(no_bias + inputs["bias"].bfloat16(), expected).passed


def test_a_row_of_equal_values_gives_the_bias_and_nothing_else():
    inputs, _ = case()
    inputs["hidden_states"][:] = 3.0
    expected = FAMILY.oracle(TWIN, inputs)
    output = inputs["bias"].bfloat16().expand(12, -1).contiguous()
    assert torch.equal(reference_outputs(TWIN, inputs, 0)["output"], output)
    assert NORMALIZED.compare(output, expected["output"]).ratio <= 1
    assert not vacuity(TWIN, expected, FAMILY.policies())


def test_rows_with_exact_sums_are_recognized():
    rows = torch.tensor([[3.0] * 64, [2.0**12] + [1.0] * 63, [2.0**17] + [1.0] * 63, [0.0] * 64])
    assert summed_exactly(rows.double()).flatten().tolist() == [True, True, False, True]
    assert bool(summed_exactly(torch.full((1, 64), 1.0).double()))
