"""What `judge` is given beside a kernel, checked before anything runs: an error names the argument and the fix."""

from __future__ import annotations

import operator
from typing import Any

import torch

from flashinfer_trace.definition import InputError
from flashinfer_trace.devices import check_visible

__all__ = ["device_name", "whole_number"]


def device_name(device: str | torch.device) -> str:
    """A device that kernels are judged on: ``cpu``, ``cuda`` or ``cuda:N``. Every index of a CPU is the CPU.

    Raises:
        InputError: torch knows no such device, does not see it here, or the judge does not run on it.
    """
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
