"""Wrong outputs that every comparison must reject. A check that accepts one of these proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.harness.compare import Expected, Policy, unit_roundoff

__all__ = ["MUTANTS", "Mutant", "applicable"]


#: Two distributions closer than this in total variation are not told apart by the draws of one case.
DISTINCT = 0.1


@dataclass(frozen=True)
class Mutant:
    """One way to be wrong.

    Attributes:
        name: for reports.
        mutate: (a correct output, the output of a case with other elements, what is expected) -> a wrong output, or
            None where this way of being wrong does not apply (a swap of equal rows, a NaN among integers).
    """

    name: str
    mutate: Callable[[torch.Tensor, torch.Tensor, Expected], torch.Tensor | None]


def zero(output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    return torch.zeros_like(output)


def stale(output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    """What the memory held before: the result of the same shapes with other elements."""
    return other.clone() if other.shape == output.shape else None


def two_rows_swapped(output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    """The two rows that differ most exchange places; of samples, all draws of the first and the last row."""
    if output.ndim < 1 or output.shape[0] < 2:
        return None
    if "group" in expected.parts:
        first, last = expected.value[0], expected.value[-1]
        draws = len(output) // len(expected.value)
        return output.roll(draws) if (first - last).abs().sum() / 2 > DISTINCT else None
    rows = output.double().nan_to_num(0, 0, 0).reshape(output.shape[0], -1)
    low, high = int(rows.sum(1).argmin()), int(rows.sum(1).argmax())
    mutated = output.clone()
    mutated[[low, high]] = output[[high, low]]
    return mutated


def shifted_by_one(output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    """Every element one place further along the last axis, as an index off by one makes it; of samples, token + 1."""
    if "group" in expected.parts:
        moved = (expected.value - expected.value.roll(1, dims=-1)).abs().sum(-1) / 2
        return (output + 1) % expected.value.shape[-1] if moved.max() > DISTINCT else None
    return output.roll(1, dims=-1) if output.ndim else None


def scaled(output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    """One per cent too large: a wrong scale factor, in a dtype fine enough to show it."""
    if not output.is_floating_point() or unit_roundoff(output.dtype) > 0.005:
        return None
    return (output.double() * 1.01).to(output.dtype)


def one_nan(output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    if not output.is_floating_point() or not output.numel():
        return None
    mutated = output.clone()
    mutated.view(-1)[output.numel() // 2] = math.nan
    return mutated


MUTANTS = (
    Mutant("zero", zero),
    Mutant("stale", stale),
    Mutant("two rows swapped", two_rows_swapped),
    Mutant("shifted by one", shifted_by_one),
    Mutant("scaled by 1.01", scaled),
    Mutant("NaN in one element", one_nan),
)


def applicable(
    mutant: Mutant, output: torch.Tensor, other: torch.Tensor, expected: Expected, policy: Policy
) -> torch.Tensor | None:
    """The mutated output, or None where it is not wrong, or where `policy` says that it cannot tell."""
    if mutant.name == "scaled by 1.01" and too_few_to_tell(policy, expected):
        return None
    mutated = mutant.mutate(output, other, expected)
    if mutated is None or torch.equal(mutated, output):
        return None
    return mutated


def too_few_to_tell(policy: Policy, expected: Expected) -> bool:
    """Whether the roundings that a policy allows for add up to one per cent of a scale, for want of elements."""
    gain = getattr(policy, "gain", None)
    return gain is not None and gain(expected) > 0.009
