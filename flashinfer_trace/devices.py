"""Whether torch sees a device. Imports torch."""

from __future__ import annotations

import torch

from flashinfer_trace.definition import InputError

__all__ = ["check_visible"]


def check_visible(device: str | torch.device) -> None:
    """Checks that tensors can be made on a device.

    Raises:
        InputError: torch knows no such device, does not see it here, or it is neither a CPU nor a CUDA device.
    """
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
