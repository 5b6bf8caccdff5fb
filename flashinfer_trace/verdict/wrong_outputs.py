"""Wrong outputs that every comparison must reject. A check that accepts one of these proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.verdict.tensors import as_integers


@dataclass(frozen=True)
class Mutant:
    """One way for an output to be wrong.

    Attributes:
        name: the name in reports.
        mutate: (a correct output, the output of a case with other elements) -> a wrong output, or None where this way
            of being wrong does not apply.
        floating_only: whether integers cannot be wrong in this way.
    """

    name: str
    mutate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
    floating_only: bool = False

    def applied(self, output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
        """The wrong output, or None where it would not be wrong (a swap of equal rows, a NaN among integers)."""
        if self.floating_only and not output.is_floating_point():
            return None
        mutated = self.mutate(output, other)
        return None if mutated is None or same_values(mutated, output) else mutated


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal, or have the same bits, as NaN may. fp8 has no `torch.equal` on a CPU."""
    if a.shape == b.shape and torch.equal(as_integers(a), as_integers(b)):
        return True
    return a.dtype.itemsize > 1 and torch.equal(a, b)


def stale(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The previous contents of the memory: a result of the same shapes with other elements."""
    return other.clone() if other.shape == output.shape else None


def two_rows_swapped(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Swaps the two rows with the smallest and the largest sum."""
    if output.ndim < 1 or output.shape[0] < 2:
        return None
    rows = output.double().nan_to_num(0, 0, 0).reshape(output.shape[0], -1)
    low, high = int(rows.sum(1).argmin()), int(rows.sum(1).argmax())
    mutated = output.clone()
    mutated[[low, high]] = output[[high, low]]
    return mutated


def shifted_by_one(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Every element moved one place along the last axis, as by an index that is off by one."""
    return output.roll(1, dims=-1) if output.ndim else None


def scaled(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """One per cent too large: a wrong scale factor, in a dtype fine enough to show it."""
    fine_enough = torch.finfo(output.dtype).eps / 2 <= 0.005
    return (output.double() * 1.01).to(output.dtype) if fine_enough else None


def one_nan(output: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    if not output.numel():
        return None
    mutated = output.clone()
    mutated.view(-1)[output.numel() // 2] = math.nan
    return mutated


#: Wrong for any output, whatever it means.
ANY_OUTPUT = (
    Mutant("zero", lambda output, other: torch.zeros_like(output)),
    Mutant("stale", stale),
    Mutant("NaN in one element", one_nan, floating_only=True),
)
ONE_PER_CENT_TOO_LARGE = Mutant("scaled by 1.01", scaled, floating_only=True)

#: Wrong where a particular value is expected for every element.
MUTANTS = (
    *ANY_OUTPUT,
    Mutant("two rows swapped", two_rows_swapped),
    Mutant("shifted by one", shifted_by_one),
    ONE_PER_CENT_TOO_LARGE,
)
