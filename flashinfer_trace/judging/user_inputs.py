"""What a user gives (sizes, seeds, devices, counts), checked before anything runs: an error names it and the fix.

Imports torch only where a device is checked.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashinfer_trace.format.definition import Definition, InputError

if TYPE_CHECKING:
    import torch

__all__ = [
    *("LARGEST_SEED", "LARGEST_SIZE", "check_visible", "checked_axes", "device_name", "explained", "requested_inputs"),
    "whole_number",
]

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


def check_visible(device: str | torch.device) -> None:
    """Checks that tensors can be made on a device.

    Raises:
        InputError: torch knows no such device, does not see it here, or it is neither a CPU nor a CUDA device.
    """
    import torch

    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r}: there is no such device; give cpu, cuda or cuda:N") from error
    if parsed.type == "cpu":
        return
    if parsed.type != "cuda":
        raise InputError(f"device {str(device)!r}: inputs are made on cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (parsed.index or 0) >= count:
        seen = f"only {count} CUDA devices, counted from 0" if count else "no CUDA device"
        raise InputError(f"device {str(device)!r}: torch sees {seen} here; use device='cpu', or another machine")


def device_name(device: str | torch.device) -> str:
    """A device that kernels are judged on: ``cpu``, ``cuda`` or ``cuda:N``. Every index of a CPU is the CPU.

    Raises:
        InputError: torch knows no such device, does not see it here, or the judge does not run on it.
    """
    import torch

    name = str(device)
    check_visible(name)
    parsed = torch.device(name)
    return "cpu" if parsed.type == "cpu" else str(parsed)


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An argument that counts.

    Raises:
        InputError: it is no whole number from `least` to `most`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        wanted = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise InputError(f"{name}={value!r}: give a whole number {wanted}")
    return number


def _is_whole(value: Any, largest: int) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and 0 <= operator.index(value) <= largest
