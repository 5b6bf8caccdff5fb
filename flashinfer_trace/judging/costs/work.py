"""The work of a Definition at given inputs: which elements it reads and writes, and how many operations it makes.

The figures are those of the function, not of one kernel: each element that the result depends on is read once, each
element of the result is written once, and every operation that counts is made once. A kernel that moves less does not
exist; one that moves more is farther from the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset import store
from flashinfer_trace.format.definition import Definition, TensorSpec
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.roots import shared
from flashinfer_trace.verdict.tensors import torch_dtype

#: Operations outside of products are made in float32, by the CUDA cores.
CUDA_CORES = "float32"

#: Which elements of a tensor are moved: a mask over its leading dimensions, or all of them (None).
Elements = torch.Tensor | None
ALL: Elements = None

#: Sizes of all axes, constant and variable.
Sizes = Mapping[str, int]
#: (sizes, inputs) -> the work. Only the values of indices, lengths, offsets and routing are read from the inputs, so
#: features may be fewer than `sizes` says.
CostFunction = Callable[[Sizes, Mapping[str, Any]], "Work"]


@dataclass(frozen=True)
class Work:
    """The work of one call.

    Attributes:
        operations: number of the main operations of each element (docs/costs.md says which), by the dtype of the
            operands: those of a product go to the tensor cores of that dtype, others to the CUDA cores. A
            multiplication and an addition of a product are two.
        reads: elements of inputs; those of an input that is not named are all read, numbers cost nothing.
        writes: elements of outputs; those of an output that is not named are all written.
    """

    operations: Mapping[str, int] = field(default_factory=dict)
    reads: Mapping[str, Elements] = field(default_factory=dict)
    writes: Mapping[str, Elements] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """The cost of one call: bytes, and operations by dtype."""

    bytes_read: int
    bytes_written: int
    operations: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        return sum(self.operations.values()) / self.bytes if self.bytes else 0.0


def cost(definition: Definition, axes: Mapping[str, int], work: Work) -> Cost:
    """The bytes and operations of some work at these values of the variable axes.

    Where nothing is written, nothing is read or computed: no element of the result could depend on it.
    """
    written = tensor_bytes(definition.outputs, definition.output_shapes(axes), work.writes)
    if not written:
        return Cost(0, 0, {})
    read = tensor_bytes(definition.inputs, definition.input_shapes(axes), work.reads)
    return Cost(read, written, {dtype: count for dtype, count in work.operations.items() if count})


def tensor_bytes(
    specs: Mapping[str, TensorSpec], shapes: Mapping[str, tuple[int, ...] | None], moved: Mapping[str, Elements] = {}
) -> int:
    """Bytes of the elements of tensors that are moved; of those that are not named in `moved`, all of them."""
    return sum(
        torch_dtype(specs[name].dtype).itemsize * count(shape, moved.get(name, ALL))
        for name, shape in shapes.items()
        if shape is not None
    )


def count(shape: tuple[int, ...], elements: Elements) -> int:
    """How many elements of a tensor of this shape a mask over its leading dimensions names."""
    size = math.prod(shape)
    if elements is None or size == 0:
        return size
    leading = tuple(size if own != 1 else 1 for size, own in zip(shape, elements.shape, strict=False))
    assert tuple(elements.shape) == leading, f"a mask {list(elements.shape)} of a tensor {list(shape)}"
    return int(elements.sum()) * (size // elements.numel())


def each(per_element: int, *axes: str) -> CostFunction:
    """So many operations for each element of a tensor with these axes; everything is read and written."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        return Work({CUDA_CORES: per_element * math.prod(sizes[axis] for axis in axes)})

    return work


class GpusError(ValueError):
    """schema/gpus.json cannot be read or is malformed. The message says why."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of schema/gpus.json: bytes and operations per second."""

    name: str
    driver_names: tuple[str, ...]
    bandwidth: float
    peak: Mapping[str, float]


@dataclass(frozen=True)
class Roofline:
    """The least time of a cost on a GPU: seconds to move the bytes, and to make the operations, at the same time."""

    gpu: str
    memory: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic)

    @property
    def bound(self) -> str:
        """The resource that it waits for: ``memory`` or ``arithmetic``."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


def load_gpus(root: Path) -> dict[str, Gpu]:
    """The GPUs of a dataset root, by short name.

    Raises:
        GpusError: schema/gpus.json cannot be read, or is malformed.
    """
    from flashinfer_trace.dataset.validation.schemas import first_problem

    path = shared(root, "schema", "gpus.json")
    try:
        gpus = load_object(path)
    except JsonSourceError as error:
        raise GpusError(f"{path}: {error}; restore it from version control") from None
    if problem := first_problem("gpus", gpus, store.find_root()):
        raise GpusError(f"{path}: {problem}; see schema/gpus.schema.json")
    return {
        name: Gpu(name, tuple(entry["names"]), entry["bandwidth"], entry["peak"])
        for name, entry in gpus["gpus"].items()
    }


def microseconds(seconds: float) -> str:
    """A time with three digits: ``12.3 us``."""
    return f"{seconds * 1e6:,.3g} us" if seconds < 1e-3 else f"{seconds * 1e6:,.0f} us"


def roofline(cost: Cost, gpu: Gpu) -> Roofline | None:
    """The least time of a cost; None if the GPU has no arithmetic for the dtype of an operand."""
    if not cost.operations.keys() <= gpu.peak.keys():
        return None
    times = [count / gpu.peak[dtype] for dtype, count in cost.operations.items()]
    # CUDA cores and tensor cores work at the same time.
    return Roofline(gpu.name, cost.bytes / gpu.bandwidth, max(times, default=0.0))
