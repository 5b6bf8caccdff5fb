"""Which verifications fit beside each other into the memory of a GPU. Imports torch."""

from __future__ import annotations

import math

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.inputs import torch_dtype

__all__ = ["memory_needed", "memory_of"]

#: Bytes of a CUDA context, libraries' workspaces, and inputs that grow with tokens.
OWN = 3 << 30
#: How many times its own bytes a weight takes: drawn as float32 and converted, or copied for a kernel.
DRAWN = 4
#: Bytes for each weight of a matrix whose float64 products an oracle computes: itself, its magnitude and its square.
JUDGED = 28


def memory_needed(definition: Definition) -> int:
    """Bytes that a process needs about, at most, to verify a Definition.

    Weights are inputs whose axes are all constant. Those of experts are judged one matrix at a time.
    """
    constant, drawn, judged = definition.const_axes, 0, 0
    for spec in definition.inputs.values():
        if spec.shape and all(axis in constant for axis in spec.shape):
            shape = [constant[axis] for axis in spec.shape]
            drawn += DRAWN * math.prod(shape) * torch_dtype(spec.dtype).itemsize
            judged = max(judged, JUDGED * math.prod(shape[-2:]))
    return OWN + drawn + judged


def memory_of(device: str) -> float:
    """Bytes of a GPU's memory; no limit for the CPU."""
    if not device.startswith("cuda"):
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory
