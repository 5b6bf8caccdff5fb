"""Copies are compared by their bits, and the numbers that show it are all drawn."""

from __future__ import annotations

import math

import pytest
import torch

from flashinfer_trace.harness.inputs import Draws, special_numbers
from flashinfer_trace.verdict.compare import Expected, rounding_error
from flashinfer_trace.verdict.copies import PartlyCopied, SameBits, partly_copied
from flashinfer_trace.verdict.tensors import as_integers

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
#: Half an output is copied, the other half rounded.
PARTLY = PartlyCopied(lambda expected: rounding_error(expected.value, torch.bfloat16), "one rounding")


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers_are_all_drawn_among_others(dtype):
    special = special_numbers(dtype)
    values = special.double()
    assert bool(values.isnan().any()) and bool(values.isinf().any() | (dtype == torch.float8_e4m3fn))
    assert {math.copysign(1, value) for value in values.tolist() if value == 0} == {1, -1}
    assert bool(((values.abs() > 0) & (values.abs() < torch.finfo(dtype).smallest_normal)).any())
    drawn = as_integers(Draws(0, "cpu").values([2, len(special)], dtype, "special"))
    assert set(as_integers(special).tolist()) <= set(drawn.flatten().tolist())
    assert bool((~torch.isin(drawn, as_integers(special))).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_passes_and_any_other_bit_does_not(dtype):
    source = special_numbers(dtype)
    expected = Expected(source)
    assert SameBits().compare(source.clone(), expected).passed
    for place in range(len(source)):
        wrong = as_integers(source).clone()
        wrong[place] ^= 1
        comparison = SameBits().compare(wrong.view(dtype), expected)
        assert not comparison.passed and comparison.index == (place,)


def test_a_zero_of_another_sign_is_not_the_same():
    zeros = Expected(torch.tensor([0.0, -0.0], dtype=torch.bfloat16))
    assert not SameBits().passes_zero(zeros, torch.bfloat16)
    assert "got 0, expected -0" in str(SameBits().compare(torch.zeros(2, dtype=torch.bfloat16), zeros))
    assert not SameBits().compare(torch.zeros(3, dtype=torch.bfloat16), zeros).passed


def test_of_a_partly_copied_output_each_element_has_its_own_rule():
    source = special_numbers(torch.bfloat16).repeat(2)
    copied = torch.arange(len(source)) < len(source) // 2
    value = torch.linspace(1.0, 2.0, len(source), dtype=torch.float64)
    expected = partly_copied(value, {}, copied, source)
    right = torch.where(copied, source, value.to(torch.bfloat16))
    assert PARTLY.compare(right, expected).passed
    assert not PARTLY.passes_zero(expected, torch.bfloat16)
    assert not PARTLY.compare(right[1:], expected).passed
    for place in range(len(source)):
        wrong = right.clone()
        wrong.view(torch.int16)[place] ^= 1 if copied[place] else 2
        comparison = PARTLY.compare(wrong, expected)
        assert not comparison.passed and comparison.index == (place,)
