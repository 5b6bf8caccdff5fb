"""Checks that the outputs of a reference or a kernel are what the Definition declares, before any value is compared.

An output is a tensor on the device of the inputs, with the declared shape and dtype; if the declared shape is null, it
is a number or a 0-d tensor. The outputs of a reference are contiguous and share no memory with inputs or each other, so
that a consumer may overwrite one without changing another. A kernel's outputs may have any strides, and may share
memory only with the inputs that the kernel declares as in-place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition, TensorSpec
from flashinfer_trace.verdict.tensors import torch_dtype

__all__ = ["misfits", "numbers_as_tensors"]


def numbers_as_tensors(
    definition: Definition, outputs: Mapping[str, Any], device: torch.device
) -> dict[str, torch.Tensor]:
    """The outputs; where the declared shape is null, a number of the declared kind becomes a 0-d tensor."""
    named = dict(outputs)
    for name, value in outputs.items():
        spec = definition.outputs.get(name)
        if spec is not None and spec.shape is None and isinstance(value, (bool, int, float)):
            dtype = torch_dtype(spec.dtype)
            kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
            if type(value) is kind:
                named[name] = torch.tensor(value, dtype=dtype, device=device)
    return named


def misfits(
    definition: Definition, axes: Mapping[str, int], outputs: Mapping[str, Any], device: torch.device
) -> list[str]:
    """One line for each output that is missing, unknown or not a tensor, or has a wrong shape, dtype or device."""
    unknown = [name for name in outputs if name not in definition.outputs]
    lines = [f"output {name} is not one of the Definition's: {list(definition.outputs)}" for name in unknown]
    shapes = definition.output_shapes(axes)
    for spec in definition.outputs.values():
        if spec.name not in outputs:
            lines.append(f"output {spec.name} is missing")
        else:
            lines += [f"output {spec.name} {wrong}" for wrong in _wrong(spec, shapes[spec.name], outputs, device)]
    return lines


def _wrong(
    spec: TensorSpec, shape: tuple[int, ...] | None, outputs: Mapping[str, Any], device: torch.device
) -> Iterator[str]:
    value = outputs[spec.name]
    if not isinstance(value, torch.Tensor):
        needed = "a tensor" if shape is not None else f"a number or a 0-d tensor, {spec.dtype}"
        yield f"is a {type(value).__name__}; it must be {needed}"
        return
    if value.layout != torch.strided:
        yield f"has the layout {value.layout}; it must be a dense tensor"
    if shape is None and value.ndim:
        yield f"has the shape {list(value.shape)}; the Definition says null, which is a number or a 0-d tensor"
    elif shape is not None and tuple(value.shape) != shape:
        yield f"has the shape {list(value.shape)}; the Definition says {list(spec.shape or ())}, here {list(shape)}"
    if value.dtype != torch_dtype(spec.dtype):
        yield f"is {value.dtype}; the Definition says {spec.dtype}"
    if value.device != device:
        yield f"is on {value.device}; the inputs are on {device}"
