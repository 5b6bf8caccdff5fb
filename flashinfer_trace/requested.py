"""Inputs at sizes and with a seed that a user gives: what cannot be is refused. Does not import torch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashinfer_trace.definition import Definition, InputError

if TYPE_CHECKING:
    import torch

__all__ = ["LARGEST_SEED", "LARGEST_SIZE", "checked_axes", "explained", "requested_inputs"]

#: The largest value of a variable axis: kernels count in int32.
LARGEST_SIZE = 2**31 - 1
#: The largest seed: generators of torch take one of 64 bits with a sign.
LARGEST_SEED = 2**63 - 1
#: What torch and Python say if there is no memory.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "MemoryError")


def requested_inputs(
    definition: Definition, axes: Mapping[str, int], seed: int, device: str | torch.device
) -> dict[str, Any]:
    """Inputs with these values of variable axes; the rest is chosen from the seed.

    Raises:
        InputError: an axis or the seed is not in its range, an axis is not variable, or no inputs can be made with it.
    """
    from flashinfer_trace.families import family_of

    given = checked_axes(definition, axes)
    if not _is_whole(seed, LARGEST_SEED):
        raise InputError(f"{definition.name}: seed {seed!r}; seeds are whole numbers from 0 to {LARGEST_SEED}")
    family = family_of(definition)
    with explained(definition, given):
        return family.inputs_for_axes(definition, given, operator.index(seed), device)


def checked_axes(definition: Definition, axes: Mapping[str, int]) -> dict[str, int]:
    """The values as integers of Python.

    Raises:
        InputError: one is no integer, or is not in the range of sizes.
    """
    for axis, value in axes.items():
        if not _is_whole(value, LARGEST_SIZE):
            raise InputError(f"{definition.name}: {axis} = {value!r}; sizes are whole numbers from 0 to {LARGEST_SIZE}")
    return {axis: operator.index(value) for axis, value in axes.items()}


@contextmanager
def explained(definition: Definition, axes: Mapping[str, int]) -> Iterator[None]:
    """Turns what a family's builders of inputs raise at these values of axes into an InputError that names them.

    Raises:
        InputError: in place of any error but those of a GPU, which say nothing about the axes.
    """
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, IndexError, MemoryError, RuntimeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        if "CUDA error" in why:
            raise
        at = f"with axes {dict(axes)}" if axes else "at the sizes that its family chooses"
        fix = "give smaller sizes" if any(sign in why for sign in _NO_MEMORY) else "give other values of axes"
        raise InputError(f"{definition.name}: no inputs can be made {at} ({why}); {fix}") from error


def _is_whole(value: Any, largest: int) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and 0 <= operator.index(value) <= largest
