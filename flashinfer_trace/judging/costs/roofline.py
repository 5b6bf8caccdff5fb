"""The least time that a GPU needs for a cost: that of its memory, or of its arithmetic, whichever is longer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.json_values import strings
from flashinfer_trace.format.roots import shared
from flashinfer_trace.judging.costs.work import Cost

__all__ = ["Gpu", "GpusError", "Roofline", "load_gpus", "roofline"]


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
    """The least time of a cost on a GPU.

    Attributes:
        memory: seconds to move the bytes.
        arithmetic: seconds to make the operations, those of the CUDA cores beside those of the tensor cores.
        seconds: the longer of both.
    """

    gpu: str
    memory: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic)

    @property
    def bound(self) -> str:
        """What it waits for: ``memory`` or ``arithmetic``."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


def load_gpus(root: Path) -> dict[str, Gpu]:
    """The GPUs of a dataset root, by short name.

    Raises:
        GpusError: schema/gpus.json cannot be read, or is malformed.
    """
    path = shared(root, "schema", "gpus.json")
    try:
        return {
            name: Gpu(
                name,
                strings(entry["names"]),
                _rate(entry["bandwidth"]),
                {dtype: _rate(peak) for dtype, peak in entry["peak"].items()},
            )
            for name, entry in load_object(path)["gpus"].items()
        }
    except JsonSourceError as error:
        raise GpusError(f"{path}: {error}; restore it from version control") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GpusError(f"{path}: malformed ({error!r}); see schema/gpus.schema.json") from None


def _rate(value: Any) -> float:
    """A number per second, by which can be divided."""
    rate = float(value)
    if not 0 < rate < math.inf:
        raise ValueError(f"{value!r} is no positive number")
    return rate


def roofline(cost: Cost, gpu: Gpu) -> Roofline | None:
    """The least time of a cost; None if the GPU has no arithmetic for the dtype of an operand."""
    if not cost.operations.keys() <= gpu.peak.keys():
        return None
    times = [count / gpu.peak[dtype] for dtype, count in cost.operations.items()]
    # CUDA cores and tensor cores work at the same time.
    return Roofline(gpu.name, cost.bytes / gpu.bandwidth, max(times, default=0.0))
