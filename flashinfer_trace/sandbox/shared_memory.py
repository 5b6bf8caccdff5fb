"""The memory in which the judge and a submission's process meet: inputs, outputs, and guards between them.

The judge fills the memory before each call, and reads it after the call. Whatever the submission's process says, it
shows inputs that were changed, outputs that were never written, and writes outside the outputs.
The same layout, copied as one block, is what a submission on a GPU works on. Tensors of one layout lie at the same
addresses in every call.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from flashinfer_trace.sandbox.protocol import span

#: Of each tensor in bytes, as torch's allocator for CUDA aligns its own; at least as much lies between two tensors.
ALIGNMENT = 512

#: Bytes of a word; how many of an input are hidden at most, and one of how many.
WORD, HIDDEN, APART = 8, 16, 512

#: The bytes between tensors: neither zero nor, in any dtype, a usual number.
GUARD = 0xA5


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in the memory: the stride in elements, the offset of its first element in bytes."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.offset + span(self.shape, self.stride) * itemsize

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Slot:
        return cls(data["dtype"], tuple(data["shape"]), tuple(data["stride"]), data["offset"])


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Slot], int]:
    """A slot for each tensor, in order, and the bytes that all of them take, with a guard behind the last."""
    slots, offset = {}, ALIGNMENT
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        slots[name] = Slot(dtype, tuple(value.shape), tuple(value.stride()), offset)
        offset = math.ceil(slots[name].end / ALIGNMENT + 1) * ALIGNMENT
    return slots, offset


def gaps(slots: Iterable[Slot], size: int) -> list[tuple[int, int]]:
    """Where no tensor lies: first byte, and the byte behind the last. The slots are in the order of their offsets."""
    edges = [0, *(edge for slot in slots for edge in (slot.offset, slot.end)), size]
    return list(zip(edges[::2], edges[1::2], strict=True))


def tensor_in(memory: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The tensor at a slot of the memory (bytes, on any device): a view."""
    dtype = getattr(torch, slot.dtype)
    if slot.offset == slot.end:
        return torch.empty(slot.shape, dtype=dtype, device=memory.device)
    flat = memory[slot.offset : slot.end].view(dtype)
    return flat.as_strided(slot.shape, slot.stride)


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor from its first element to its last, on its device: those between strided elements too."""
    value = value.detach()
    flat = value.as_strided((span(value.shape, value.stride()),), (1,))
    return flat.view(torch.uint8)


class Filled:
    """Shared memory with the inputs and poisoned outputs of one call in it.

    Attributes:
        slots: where each tensor lies; outputs are named ``output NAME``.
        size: bytes of all of them; what lies behind is for copies of the outputs.
        first: byte at which the outputs begin.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], poisoned: Mapping[str, torch.Tensor]) -> None:
        self._inputs, self._poisoned = inputs, poisoned
        self.slots, self.size = layout({**inputs, **{f"output {name}": value for name, value in poisoned.items()}})
        self.first = min(self.slots[f"output {name}"].offset for name in poisoned)

    def fill(self, memory: torch.Tensor) -> None:
        """Copies the tensors into memory, and remembers what is there."""
        self._memory = memory
        self._guards = [memory[start:end] for start, end in gaps(self.slots.values(), self.size)]
        for guard in self._guards:
            guard.fill_(GUARD)
        values = [*self._inputs.values(), *self._poisoned.values()]
        for slot, value in zip(self.slots.values(), values, strict=True):
            memory[slot.offset : slot.end].copy_(memory_of(value))
        self._before = {name: self._bytes(name).clone() for name in self._inputs}

    def hide(self) -> dict[str, list[int]]:
        """Makes some words of the inputs wrong, at random places: where they are, and what they held.

        There are few of them, because restoring a word just before a call leaves it in the GPU's cache.
        """
        inputs = self._memory[: self.first].view(torch.int64)
        lengths = {name: -(-(self.slots[name].end - self.slots[name].offset) // WORD) for name in self._inputs}
        counts = {name: min(HIDDEN, length // APART) for name, length in lengths.items()}
        if not any(counts.values()):
            counts |= {name: 1 for name in sorted(lengths, key=lengths.__getitem__)[-1:] if lengths[name]}
        places = {
            self.slots[name].offset // WORD + secrets.randbelow(lengths[name])
            for name, count in counts.items()
            for _ in range(count)
        }
        at = torch.tensor(sorted(places), dtype=torch.int64)
        words = inputs[at]
        inputs[at] = ~words
        return {"places": at.tolist(), "words": words.tolist()}

    def changed(self) -> list[str]:
        """Inputs that hold other bits than before."""
        return [name for name, before in self._before.items() if not torch.equal(self._bytes(name), before)]

    def outside(self) -> bool:
        """Whether something between the tensors was written."""
        return any(bool((guard != GUARD).any()) for guard in self._guards)

    def outputs(self, copy: int | None = None) -> dict[str, torch.Tensor]:
        """Copies of the outputs, in which every boolean is one: those in place, or of the copies behind the tensors."""
        shift = 0 if copy is None else (copy + 1) * (self.size - self.first)
        found = {}
        for name, poisoned in self._poisoned.items():
            slot = self.slots[f"output {name}"]
            value = tensor_in(self._memory, replace(slot, offset=slot.offset + shift))
            value = value.view(torch.uint8) != 0 if value.dtype == torch.bool else value.clone()
            found[name] = value.to(poisoned.device)
        return found

    def _bytes(self, name: str) -> torch.Tensor:
        return self._memory[self.slots[name].offset : self.slots[name].end]


class SharedMemory:
    """Memory that two processes share.

    Attributes:
        size: in bytes.
        memory: its bytes, uint8 [size], on the CPU.
    """

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Maps `size` bytes of the open file `descriptor`, or of a new one that has no name."""
        self.size = size
        self.descriptor = _anonymous_file(size) if descriptor is None else descriptor
        self._mapped = mmap.mmap(self.descriptor, size)
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def close(self) -> None:
        """Closes the file; the memory is freed with the last tensor in it."""
        os.close(self.descriptor)


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tensors")  # a submission sees the name
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor
