"""Tensors that begin beyond the reach of 32-bit offsets: the few rows of a case, with many others before them.

A case means what it meant: the oracle and the reference see its own rows alone. Each row before them is a copy of their
first one, so a kernel can compute it. An offset that wraps around reads such a copy, or writes where nobody looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class FarRows:
    """Which tensors of a call have rows before their own, and how many.

    Attributes:
        inputs, outputs: by name, rows (of the first axis) before its own.
        places: by name, what is added to each place that an index input holds; negative ones stand for none.
        offsets: by name, how many rows the first group of an index input gains: the offsets of all others move.
        requests: by name, how many rows a request has that comes before all others.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    places: Mapping[str, int] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)

    def given(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the call: those with rows before them in memory of their own, all others as they are."""
        return {name: behind(value, self.inputs.get(name, 0)) for name, value in self.moved(inputs).items()}

    def moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs with places in the rows of the call, but without the rows before them."""
        found = dict(inputs)
        for name, rows in self.places.items():
            found[name] = torch.where(inputs[name] >= 0, inputs[name] + rows, inputs[name])
        for name, rows in self.offsets.items():
            found[name] = torch.cat([inputs[name][:1], inputs[name][1:] + rows])
        for name, rows in self.requests.items():
            found[name] = torch.cat([inputs[name][:1], inputs[name] + rows])
        return found

    def filled(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Memory for the outputs of the call, that holds what `outputs` hold."""
        return {name: behind(value, self.outputs.get(name, 0)) for name, value in outputs.items()}

    def own(self, tensors: Mapping[str, Any], rows: Mapping[str, int]) -> dict[str, Any]:
        """The last rows of the tensors that have others before them; what has another form stays as it is.

        Args:
            tensors: inputs or outputs of the call, by name.
            rows: `inputs` or `outputs`.
        """
        return {
            name: value[rows[name] :] if name in rows and isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in tensors.items()
        }

    def bytes_of(self, inputs: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]) -> int:
        """GPU memory that a call takes: its inputs, and its outputs three times: given, returned, and computed with."""
        given = sum(rows * _row_bytes(inputs[name]) for name, rows in self.inputs.items())
        return given + 3 * sum(rows * _row_bytes(outputs[name]) for name, rows in self.outputs.items())

    def to_json(self) -> dict[str, dict[str, int]]:
        return asdict(self)


def behind(value: Any, rows: int) -> Any:
    """A dense tensor whose last rows are those of `value`, behind so many others."""
    if not rows:
        return value
    whole = torch.empty((rows + len(value), *value.shape[1:]), dtype=value.dtype, device=value.device)
    whole[rows:] = value
    whole[:rows] = value[:1]
    return whole


def _row_bytes(value: torch.Tensor) -> int:
    return math.prod(value.shape[1:]) * value.itemsize
