"""Measurements that the tests of the mixtures of experts share."""

from __future__ import annotations

import math

from flashinfer_trace.harness.case import kernel_outputs


def fitted_gain(output, expected):
    """The scale fitted to all elements of an output, minus 1."""
    return float((output.double() * expected.value).sum() / expected.value.square().sum()) - 1


def measured_over_modeled_gain(twin, kernel, cases):
    """The measured deviation of a pipeline's scale, divided by the modeled one; cases are (inputs, expected)."""
    gains, modeled = [], []
    for inputs, expected in cases:
        gains.append(fitted_gain(kernel_outputs(twin, kernel, inputs)[0]["output"], expected))
        modeled.append(float(expected.parts["hopper_gain"]))
    return math.sqrt(sum(gain**2 for gain in gains) / sum(modeled))
