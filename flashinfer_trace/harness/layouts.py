"""How inputs lie in memory, and what lies among their rows: dense; with NaN between rows; or with a row of NaN.

A plan has an entry ``layout`` where it is not dense. Inputs mean the same in each layout. The only
exception is a row of NaN: its own outputs are not judged, and all other rows must come out as if it were not there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

#: The entry of a plan, and its values other than the usual one.
LAYOUT, STRIDED, NAN_ROW = "layout", "strided", "nan_row"
#: Rows, or pages, behind so many others that 32 bits do not count their elements: see `harness.far`. On a GPU only.
FAR = "far"
#: Bytes between two rows: as aligned as the rows are, whatever a kernel loads at once.
APART = 256
#: NaN in any floating-point dtype.
NAN_BYTE = 0xFF
#: 1 in float8_e4m3fn and in float8_e5m2; NaN is written over with it.
ONES = {torch.float8_e4m3fn: 0x38, torch.float8_e5m2: 0x3C}


def rows_apart(inputs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The inputs, with NaN between the rows (of the first axis) of those of these names, as in a slice of a wider
    tensor or in a padded cache. Within a row, elements stay dense."""
    return {name: _apart(value) if name in names else value for name, value in inputs.items()}


def _apart(value: torch.Tensor) -> torch.Tensor:
    if value.ndim < 2 or not value.numel():
        return value
    rows, row = len(value), value[0].numel()
    memory = torch.full((rows, row * value.itemsize + APART), NAN_BYTE, dtype=torch.uint8, device=value.device)
    return memory.view(value.dtype)[:, :row].view(value.shape).copy_(value)


def with_nan_row(inputs: Mapping[str, Any], names: Collection[str], seed: int) -> dict[str, Any]:
    """The inputs, with NaN in one row (of the first axis) of those of these names; as they are, if they have one row
    at most or a row of NaN."""
    count = len(inputs[next(iter(names))])
    if count < 2 or nan_rows(inputs, names) is not None:
        return dict(inputs)
    found = dict(inputs)
    for name in names:
        found[name] = inputs[name].clone()
        found[name].view(count, -1).view(torch.uint8)[seed % count] = NAN_BYTE
    return found


def nan_rows(inputs: Mapping[str, Any], names: Collection[str]) -> torch.Tensor | None:
    """bool [rows]: which rows of these inputs begin with NaN; None if none does."""
    found = [_nan(inputs[name].reshape(len(inputs[name]), -1)[:, 0]) for name in names if inputs[name].numel()]
    rows = torch.stack(found).any(dim=0) if found else None
    return rows if rows is not None and bool(rows.any()) else None


def without_nan(inputs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The inputs with 1 for each NaN: what an oracle is asked about. Of those in fp8, which may be bytes of something
    else, only those of these names."""
    return {
        name: _ones_for_nan(value)
        if isinstance(value, torch.Tensor) and (name in names or value.dtype not in ONES)
        else value
        for name, value in inputs.items()
    }


def _nan(value: torch.Tensor) -> torch.Tensor:
    if value.dtype in ONES:
        return value.float().isnan()
    return value.isnan() if value.is_floating_point() else torch.zeros_like(value, dtype=torch.bool)


def _ones_for_nan(value: torch.Tensor) -> torch.Tensor:
    if value.dtype in ONES:
        plain = value.contiguous()
        return torch.where(_nan(plain), ONES[value.dtype], plain.view(torch.uint8)).view(value.dtype)
    return torch.where(_nan(value), 1.0, value) if value.is_floating_point() else value
