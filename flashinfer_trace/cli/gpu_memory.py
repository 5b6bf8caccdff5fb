"""Which verifications fit beside each other into the memory of a GPU. Imports torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.inputs import torch_dtype

__all__ = ["Group", "Queue", "Work", "memory_of", "memory_of_weights"]

#: Tasks that one process verifies, those of each Definition together.
Group = Sequence[Sequence[Task]]

#: Bytes of a CUDA context and of what libraries allocate by themselves.
CONTEXT = 1 << 30
#: Bytes that a Definition is thought to need besides those of its weights before one of its family was verified.
BESIDES = 2 << 30
#: How many times its own bytes a weight takes: itself, drawn as float32 and converted; or copied, and compared.
DRAWN = 3
#: Bytes for each weight of a matrix whose float64 products an oracle computes: itself, its magnitude and its square.
JUDGED = 28


def memory_of_weights(definition: Definition) -> int:
    """Bytes that a process needs about, at most, for the weights of a Definition: inputs whose axes are all constant.

    Those of experts are judged one matrix at a time.
    """
    constant, drawn, judged = definition.const_axes, 0, 0
    for spec in definition.inputs.values():
        if spec.shape and all(axis in constant for axis in spec.shape):
            shape = [constant[axis] for axis in spec.shape]
            drawn += DRAWN * math.prod(shape) * torch_dtype(spec.dtype).itemsize
            judged = max(judged, JUDGED * math.prod(shape[-2:]))
    return drawn + judged


def memory_of(device: str) -> float:
    """Bytes of a GPU's memory; no limit for the CPU."""
    if not device.startswith("cuda"):
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory


@dataclass
class Work:
    """A group of tasks.

    Attributes:
        family: of its first task.
        weights: bytes for weights, see `memory_of_weights`.
        least: bytes that it needs at least, because fewer were too few.
    """

    group: Group
    family: str
    weights: int
    least: float = 0.0

    @classmethod
    def of(cls, group: Group) -> Work:
        first = group[0][0]
        return cls(group, first.family.name if first.family else "", memory_of_weights(first.definition))


class Queue:
    """Groups of tasks that wait for a process, and for room on its GPU beside what other processes verify there.

    How much a Definition needs is found out from those of its family that went before: where weights are most of it,
    how many times their estimate, elsewhere how much besides.

    Args:
        groups: on GPUs, those with the largest weights go first, so that small ones fill the room that they leave.
        room: device -> bytes of its memory.
    """

    def __init__(self, groups: Sequence[Group], room: Mapping[str, float]) -> None:
        self._room = room
        self._waiting = [Work.of(group) for group in groups]
        if any(math.isfinite(one) for one in room.values()):
            self._waiting.sort(key=lambda work: work.weights, reverse=True)
        self._times: defaultdict[str, float] = defaultdict(lambda: 1.0)
        self._besides: defaultdict[str, float] = defaultdict(lambda: BESIDES)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, device: str, beside: Sequence[Work], kept: int = 0) -> Work | None:
        """The first that the device has room for, besides what is verified on it now; any, if nothing is.

        Args:
            kept: bytes of its memory that processes hold between two verifications.
        """
        free = self._room[device] - kept - sum(map(self._needed, beside)) if beside else math.inf
        for work in self._waiting:
            if self._needed(work) <= free:
                self._waiting.remove(work)
                return work
        return None

    def learn(self, work: Work, peak: int) -> None:
        """Takes down that torch had so many bytes at most while this was verified."""
        if 2 * work.weights > peak:
            self._times[work.family] = max(self._times[work.family], peak / work.weights)
        else:
            self._besides[work.family] = max(self._besides[work.family], peak - work.weights)

    def put_back(self, work: Work, device: str) -> bool:
        """Lets wait again what ran out of memory, for twice as much; not if it had all of the device's."""
        had = self._needed(work)
        if had >= self._room[device]:
            return False
        work.least = 2 * had
        self._waiting.insert(0, work)
        return True

    def _needed(self, work: Work) -> float:
        return max(work.least, CONTEXT + work.weights * self._times[work.family] + self._besides[work.family])
