"""The dtypes of the format in torch, and the bits of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

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


def device_of(inputs: Mapping[str, Any]) -> torch.device:
    """The device of the input tensors."""
    return next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))


def differing(a: Mapping[str, Any], b: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of `names` whose values do not have the same bits in `a` and `b`; one transfer from a GPU."""
    found = {name: different_bits(a[name], b[name]) for name in names}
    flags = [flag for flag in found.values() if isinstance(flag, torch.Tensor)]
    known = iter(torch.stack(flags).tolist() if flags else [])
    return [name for name, flag in found.items() if (next(known) if isinstance(flag, torch.Tensor) else flag)]


def different_bits(a: Any, b: Any) -> bool | torch.Tensor:
    """Whether the bits differ: a 0-d tensor where it takes a GPU to tell."""
    if not isinstance(a, torch.Tensor) or a.device.type == "cpu" or (a.shape, a.dtype) != (b.shape, b.dtype):
        return not same_bits(a, b)
    return (as_integers(a) != as_integers(b)).any()


def same_bits(a: Any, b: Any) -> bool:
    """Bitwise equality: NaN in unused memory compares equal to itself."""
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    flat_a, flat_b = (as_integers(value).flatten() for value in (a, b))
    return flat_a.dtype == flat_b.dtype and torch.equal(flat_a, flat_b)
