"""Wrong outputs that every comparison must reject. A check that accepts one of these proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.harness.compare import Expected, unit_roundoff

__all__ = ["MUTANTS", "Mutant", "applicable"]


@dataclass(frozen=True)
class Mutant:
    """One way to be wrong.

    Attributes:
        name: for reports.
        mutate: (a correct output, the output of a case with other elements) -> a wrong output, or None where this way
            of being wrong does not apply (a swap of equal rows, a NaN among integers).
    """

    name: str
    mutate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


def zero(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    return torch.zeros_like(output)


def stale(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """What the memory held before: the result of the same shapes with other elements."""
    return other.clone() if other.shape == output.shape else None


def two_rows_swapped(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The two rows that differ most exchange places."""
    if output.ndim < 1 or output.shape[0] < 2:
        return None
    rows = output.double().nan_to_num(0, 0, 0).reshape(output.shape[0], -1)
    low, high = int(rows.sum(1).argmin()), int(rows.sum(1).argmax())
    mutated = output.clone()
    mutated[[low, high]] = output[[high, low]]
    return mutated


def shifted_by_one(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Every element one place further along the last axis, as an off-by-one in an index makes it."""
    return output.roll(1, dims=-1) if output.ndim else None


def scaled(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """One per cent too large: a wrong scale factor, in a dtype fine enough to show it."""
    if not output.is_floating_point() or unit_roundoff(output.dtype) > 0.005:
        return None
    return (output.double() * 1.01).to(output.dtype)


def one_nan(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
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


def applicable(mutant: Mutant, output: torch.Tensor, other: torch.Tensor, expected: Expected) -> torch.Tensor | None:
    """The mutated output, or None where it would equal the correct one."""
    mutated = mutant.mutate(output, other)
    if mutated is None or torch.equal(mutated, output):
        return None
    return mutated
