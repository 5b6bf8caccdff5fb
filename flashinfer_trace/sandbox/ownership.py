"""Whether outputs lie in memory of their own. Looked at where a reference runs: a copy tells nothing of it any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def not_owned(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> list[str]:
    """One line for each output of a reference that is not contiguous, or not in memory of its own."""
    lines = [
        f"output {name} is not contiguous: strides {list(value.stride())} of the shape {list(value.shape)}"
        for name, value in outputs.items()
        if not value.is_contiguous()
    ]
    lines += aliased(outputs, inputs)
    names = list(outputs)
    for number, name in enumerate(names):
        earlier = {other: outputs[other] for other in names[:number]}
        lines += [f"output {name} shares memory with output {other}" for other in _sharing(outputs[name], earlier)]
    return lines


def aliased(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, Any]) -> list[str]:
    """One line for each output that shares memory with one of `inputs`."""
    return [
        f"output {name} shares memory with input {other}"
        for name, value in outputs.items()
        for other in _sharing(value, inputs)
    ]


def _sharing(value: torch.Tensor, others: Mapping[str, Any]) -> list[str]:
    """Which of the tensors lie in the same storage; a storage without bytes is shared by none."""
    storage = value.untyped_storage()
    return [
        name
        for name, other in others.items()
        if storage.nbytes()
        and isinstance(other, torch.Tensor)
        and other.untyped_storage().data_ptr() == storage.data_ptr()
    ]
