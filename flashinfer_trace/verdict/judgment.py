"""The judgment of a case: its outputs against the oracle, whether it could fail, and which of two results is closer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_trace.dataset.accuracy import too_far
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.verdict.compare import Comparison, Expected, Policy, correctly_rounded, rounding_norm_error
from flashinfer_trace.verdict.tensors import torch_dtype

#: See `by_chance`.
SIGNIFICANT = 3.0


def evaluate(
    policies: Mapping[str, Policy], actual: Mapping[str, torch.Tensor], expected: Mapping[str, Expected]
) -> dict[str, Comparison]:
    """Each output against the oracle."""
    return {name: policies[name].compare(judged(actual[name], want), want) for name, want in expected.items()}


def judged(actual: torch.Tensor, expected: Expected) -> torch.Tensor:
    """An output with what is expected in the rows that are not judged."""
    value, rows = expected.value, expected.unjudged
    if rows is None or actual.shape != value.shape:
        return actual
    right = correctly_rounded(value, actual.dtype) if actual.is_floating_point() else value
    return torch.where(rows.view(-1, *[1] * (value.ndim - 1)), right.to(actual.dtype), actual)


def vacuity(definition: Definition, expected: Mapping[str, Expected], policies: Mapping[str, Policy]) -> str:
    """Why the case could not fail, or an empty string: an empty output, or one that zeros would pass."""
    for name, want in expected.items():
        if not want.value.numel():
            return f"{name} is empty"
        if want.unjudged is not None and bool(want.unjudged.all()):
            return f"every row of {name} may be anything"
        if policies[name].passes_zero(want, torch_dtype(definition.outputs[name].dtype)):
            return f"a zero {name} would pass"
    return ""


def describe(who: str, comparisons: Mapping[str, Comparison], policies: Mapping[str, Policy]) -> list[str]:
    """One line for each output that failed, with the reason of its bound."""
    return [
        f"{who}: output {name}: {comparison}; bound: {policies[name].reason}"
        for name, comparison in comparisons.items()
        if not comparison.passed
    ]


def less_accurate_reference(
    comparisons: Mapping[str, tuple[Comparison, Comparison]],
    expected: Mapping[str, Expected],
    actual: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
) -> list[str]:
    """A line for each output in which the kernel is closer to the oracle than the reference."""
    lines = []
    for name, want in expected.items():
        if not want.value.is_floating_point() or want.value.shape != actual[name].shape:
            continue
        reference, kernel = (comparison.error for comparison in comparisons[name])
        if reference <= too_far(kernel):
            continue
        rounded = want.once(rounding_norm_error, actual[name].dtype)
        if reference > too_far(rounded) and not by_chance(want.value, actual[name], outputs[name]):
            lines.append(
                f"reference: output {name} is farther from the oracle "
                f"(relative norm {reference:.3g}) than the kernel ({kernel:.3g}); compute it in float32 and round once"
            )
    return lines


def by_chance(value: torch.Tensor, reference: torch.Tensor, kernel: torch.Tensor) -> bool:
    """Whether few rows explain by how much a reference's error is larger than a kernel's.

    Were the two errors of each row alike, their differences would be as often positive as negative, and the sum of all
    would exceed SIGNIFICANT times the root of the sum of their squares once in 700 cases.
    """
    errors = [(output.double() - value).nan_to_num(0.0, 0.0, 0.0).square() for output in (reference, kernel)]
    more = errors[0] - errors[1]
    rows = more.flatten(end_dim=-2).sum(dim=-1) if more.ndim > 1 else more.flatten()
    return bool(rows.sum() <= SIGNIFICANT * rows.norm())
