"""Errors that lean to one side: within the bound of every element, and found over the rows of all cases together."""

from __future__ import annotations

import random

import pytest
import torch

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import shared_case
from flashinfer_trace.harness.cases import cases
from flashinfer_trace.harness.job import Job
from flashinfer_trace.judging.judge import judge
from flashinfer_trace.judging.verdict import Grade
from flashinfer_trace.verdict.compare import ErrorBound, Expected, correctly_rounded
from flashinfer_trace.verdict.errors import RowSigns
from flashinfer_trace.verdict.tensors import as_integers

SUM = "moe_sum_reduce_topk8_h2048"
#: Sums in float32. A known kernel rounds each sum twice, within whose bounds one truncation is in every element.
SUMMED = """
import torch

def run(hidden_states, factor):
    total = hidden_states.float().sum(dim=1) * factor
    RESULT
"""
RIGHT = {
    "rounded once": "return total.bfloat16()",
    "rounded twice": "return hidden_states.float().sum(dim=1).bfloat16() * factor",
}
TRUNCATED = "return (total.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()"
AWAY = "return ((total.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32).bfloat16()"


@pytest.mark.parametrize("way", RIGHT)
def test_a_kernel_that_rounds_to_nearest_is_right(way, tmp_path, server):
    (tmp_path / "mine.py").write_text(SUMMED.replace("RESULT", RIGHT[way]))
    verdict = judge(str(tmp_path / "mine.py"), SUM, seed=1, server=server)
    assert verdict.passed, verdict


@pytest.mark.parametrize(("result", "direction"), [(TRUNCATED, "-"), (AWAY, "+")])
def test_a_kernel_that_rounds_in_one_direction_is_wrong(result, direction, tmp_path, server):
    (tmp_path / "mine.py").write_text(SUMMED.replace("RESULT", result))
    verdict = judge(str(tmp_path / "mine.py"), SUM, seed=1, server=server)
    assert verdict.grade == Grade.WRONG and verdict.failure.kind == "values", verdict
    assert "rows of all cases, errors are" in verdict.failure.message, "no element is beyond its bound"
    assert f"errors are {direction}" in verdict.failure.message and "away from zero" in verdict.failure.message


def toward_zero(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 values, truncated to the dtype."""
    nearest = value.to(dtype)
    beyond = nearest.isfinite() & (nearest.double().abs() > value.abs())
    bits = as_integers(nearest)
    return torch.where(beyond, bits - 1, bits).view(dtype)


def leaning(policy, expected, output):
    signs = RowSigns()
    for want in expected:
        signs.add(policy, output(want), want)
    return signs.comparison()


@pytest.mark.parametrize(
    "name",
    [
        *("rmsnorm_h2048", "rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128", "gelu_tanh_and_mul_i10240", SUM),
        *("gemm_bf16_n102400_k2048", "merge_state_h16_d128", "fused_qknorm_h16_kv1_d128"),
    ],
)
def test_truncation_shows_under_the_bounds_of_each_kernel_and_roundings_to_nearest_never(name):
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    job, drawn = Job(definition, family), iter(range(12))
    found: dict[str, list[tuple[Expected, torch.Tensor]]] = {}
    for case in cases(job, 0, lambda: 12 if next(drawn, None) is not None else 0, random.Random(1)):
        shared = shared_case(job.sized, family, case.plan, case.seed, "cpu")
        for output, want in shared.expected.items():
            found.setdefault(output, []).append((want, shared.actual[output]))
    for output, every in found.items():
        expected, dtype = [want for want, _ in every], every[0][1].dtype
        if dtype != torch.bfloat16:
            continue  # in float32 bounds are those of sums, far beyond one truncation
        for kernel in (None, *family.kernels):
            policy = family.policies(kernel)[output]
            assert isinstance(policy, ErrorBound)
            nearest = leaning(policy, expected, lambda want: correctly_rounded(want.value, dtype).to(dtype))  # noqa: B023
            truncated = leaning(policy, expected, lambda want: toward_zero(want.value, dtype))  # noqa: B023
            assert nearest.ratio < 0.3 and truncated.ratio > 1, (kernel and kernel.label, nearest, truncated)
        signs = RowSigns()
        for want, actual in every:
            signs.add(family.policies()[output], actual, want)
        assert signs.comparison().ratio < 0.3, "the reference"


def test_few_rows_exact_results_and_rows_that_are_not_judged_say_nothing():
    value = torch.rand(2000, 8, dtype=torch.float64) + 1
    policy = ErrorBound(lambda expected: expected.value.abs() * 2**-7, "two roundings")
    lower = value - 2**-8
    assert RowSigns().comparison() is None
    signs = RowSigns()
    signs.add(policy, lower[:100], Expected(value[:100]))
    assert signs.comparison().passed, "100 rows"
    signs.add(policy, lower[100:], Expected(value[100:]))
    assert not signs.comparison().passed and "over 2000 rows" in signs.comparison().detail
    signs = RowSigns()
    signs.add(policy, lower, Expected(value, exact=True))
    signs.add(policy, lower, Expected(value, unjudged=torch.ones(2000, dtype=torch.bool)))
    signs.add(policy, lower[:0], Expected(value[:0]))
    signs.add(policy, lower + 1e9, Expected(value))  # elements that are copied have a rule of their own
    assert signs.comparison() is None
