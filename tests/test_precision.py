"""References multiply at full precision on a GPU, however the process was set; its settings come back."""

from __future__ import annotations

import copy

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.format.precision import full_precision_products
from flashinfer_trace.harness.case import reference_outputs


def settings():
    options = torch.backends.cuda.matmul
    reduced = options.allow_fp16_reduced_precision_reduction, options.allow_fp16_accumulation
    return (torch.get_float32_matmul_precision(), *reduced)


@pytest.fixture(params=[("high", True, True), ("highest", False, False), ("medium", True, False)])
def set_to(request):
    """Settings of the process other than the defaults."""
    before = settings()
    apply(request.param)
    yield request.param
    apply(before)


def apply(values):
    options = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision(values[0])
    options.allow_fp16_reduced_precision_reduction, options.allow_fp16_accumulation = values[1:]


def test_a_reference_runs_at_full_precision(set_to):
    definition = copy.copy(flashinfer_trace.load("rmsnorm_h512"))
    seen = []
    definition.__dict__["compiled"] = lambda rows, weight: seen.append(settings()) or rows
    inputs = flashinfer_trace.make_inputs(definition, {"batch_size": 2}, seed=0, device="cpu")
    reference_outputs(definition, inputs, seed=0)
    definition.run(**inputs)
    assert seen == [("highest", False, False)] * 2
    assert settings() == set_to


def test_the_settings_come_back_after_an_error(set_to):
    with pytest.raises(ZeroDivisionError), full_precision_products():
        assert settings() == ("highest", False, False)
        raise ZeroDivisionError
    assert settings() == set_to
