"""The dtypes of the format in torch, and the bits of a tensor's elements."""

from __future__ import annotations

import torch

__all__ = ["INTEGERS", "as_integers", "torch_dtype"]

#: Bytes of an element -> the integer dtype that shows its bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a format name (``bfloat16``)."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_integers(value: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer."""
    return value.detach().contiguous().view(INTEGERS[value.dtype.itemsize])
