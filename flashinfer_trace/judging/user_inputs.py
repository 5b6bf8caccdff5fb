"""Checks a user's values (sizes, seeds, devices, counts) before anything runs. An error names the value and the fix.

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

#: The largest value of an axis: kernels count in int32.
LARGEST_SIZE = 2**31 - 1
#: The largest seed: generators of torch take one of 64 bits with a sign.
LARGEST_SEED = 2**63 - 1
#: Messages of torch and Python for a lack of memory.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


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
        InputError: one is not an integer, or is not in the range of sizes.
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
        fix = "give smaller sizes" if out_of_memory(error) else "give other values of axes"
        raise InputError(f"{definition.name}: no inputs can be made {at} ({why}); {fix}") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that this process, or its GPU, has no memory left."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _NO_MEMORY)


def wrong_device(device: str | torch.device, elsewhere: bool = False) -> str:
    """Why tensors cannot be made on a device; empty if they can. `elsewhere`, any GPU will do."""
    import torch

    try:
        parsed = torch.device(device)
    except RuntimeError:
        return "there is no such device; give cpu, cuda or cuda:N"
    if parsed.type not in ("cpu", "cuda"):
        return "it runs on cpu, cuda or cuda:N"
    count = torch.cuda.device_count() if parsed.type == "cuda" and torch.cuda.is_available() else 0
    if elsewhere or parsed.type == "cpu" or (parsed.index or 0) < count:
        return ""
    seen = f"only {count} CUDA devices, counted from 0," if count else "no CUDA device"
    return f"torch sees {seen} here; use cpu, or another machine"


def device_name(device: str | torch.device) -> str:
    """A device as torch names it: ``cpu``, ``cuda`` or ``cuda:N``. Every index of a CPU is the CPU.

    Raises:
        InputError: torch knows no such device, does not see it here, or it is neither a CPU nor a CUDA device.
    """
    import torch

    name = str(device)
    if why := wrong_device(name):
        raise InputError(f"device {name!r}: {why}")
    return "cpu" if torch.device(name).type == "cpu" else str(torch.device(name))


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An argument that counts.

    Raises:
        InputError: it is not a whole number from `least` to `most`.
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
