"""Checks that the outputs of a reference or a kernel are what the Definition declares, before any value is compared.

An output is a tensor on the device of the inputs, with the declared shape and dtype; if the declared shape is null, it
is a number or a 0-d tensor. The outputs of a reference are contiguous and share no memory with inputs or each other: a
consumer can overwrite one without changing another. A kernel's outputs may have any strides, and may share memory only
with the inputs that the kernel declares as in-place.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition, TensorSpec
from flashinfer_trace.verdict.random_words import of_words
from flashinfer_trace.verdict.tensors import device_of, torch_dtype


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


def poisoned_outputs(definition: Definition, inputs: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Output tensors full of NaN (integers: their smallest value): an element that is never written shows.

    Both values of a boolean can be right. So booleans are drawn, with `seed` and apart from the inputs of that seed: a
    boolean that is never written shows in every other call.
    """
    shapes = definition.output_shapes(definition.bind_axes(inputs))
    outputs = {}
    for name, shape in shapes.items():
        dtype = torch_dtype(definition.outputs[name].dtype)
        if dtype == torch.bool:
            own, count = zlib.crc32(f"poison {name} {seed}".encode()), math.prod(shape or ())
            drawn = of_words(own, 1, count, device_of(inputs), lambda words, library: words & 1, "int64")
            outputs[name] = drawn.view(shape or ()).to(dtype)
            continue
        poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        outputs[name] = torch.full(shape or (), poison, dtype=dtype, device=device_of(inputs))
    return outputs


def poison_allocator(outputs: Mapping[str, torch.Tensor]) -> None:
    """Frees poisoned blocks of the outputs' sizes. A kernel that allocates its results then likely gets those."""
    blocks = [torch.empty_like(tensor).copy_(tensor) for tensor in outputs.values()]
    del blocks
