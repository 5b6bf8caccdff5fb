"""Checks what a written reason claims: that a mutant answers as the reference does, in every case."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.inputs import clone_inputs
from flashinfer_trace.verdict.compare import unit_roundoff
from tools.mutate.cases import Bench, Case
from tools.mutate.judge import same_outputs

#: Float32 roundings that a sum in another order may leave, in parts of the largest element.
FLOAT32 = 2.0**-20


def same_up_to_rounding(outputs: Mapping[str, torch.Tensor], case: Case) -> bool:
    """Whether float32 arithmetic in another order explains all differences, before one rounding to the output's dtype.

    Such outputs have equal dtypes, shapes, infinities and NaN; elements differ by at most one unit in the last place of
    the dtype, and 2^-20 of the largest element, times the largest element of all outputs if that exceeds 1: it may be a
    logarithm, whose error is a factor of the others.
    """
    factor = max(1.0, *(largest(original) for original in case.original.values()))
    return all(close(outputs[name], original, factor) for name, original in case.original.items())


def largest(value: torch.Tensor) -> float:
    """The largest absolute value of the finite elements; 0 if there is none."""
    finite = value.double().abs()[value.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def close(actual: torch.Tensor, original: torch.Tensor, factor: float) -> bool:
    if actual.dtype != original.dtype or actual.shape != original.shape:
        return False
    if not original.is_floating_point() or not original.numel():
        return torch.equal(actual, original)
    a, b = actual.double(), original.double()
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return False
    bound = 2 * unit_roundoff(original.dtype) * b.abs() + FLOAT32 * factor * largest(original)
    return bool(((a - b).abs()[finite] <= bound[finite]).all())


#: How the mutants of a reason are checked: the same bits, or the same up to the order of float32 sums.
CHECKS = {"bits": same_outputs, "rounding": same_up_to_rounding}


def first_difference(bench: Bench, source: str, check: str) -> str:
    """The first case in which a mutant answers otherwise than the reference, or an empty string."""
    for number, case in enumerate(bench.cases, 1):
        where = f"case {number} of {len(bench.cases)}, {case.size} size"
        definition = bench.sized(source, case.size)
        try:
            outputs = reference_outputs(definition, clone_inputs(dict(case.inputs)), case.seed)
        except Exception as error:
            return f"{where}: {type(error).__name__}: {error}"[:200]
        if not CHECKS[check](outputs, case):
            return f"{where}: the outputs differ"
    return ""
