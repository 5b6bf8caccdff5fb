"""Hand-made rows for the tests of the sampling families."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer_trace
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family

#: Dyadic fractions (1/16, 1/2, 1/16, 1/4, 1/8), so every sum is exact.
EXACT = [0.0625, 0.5, 0.0625, 0.25, 0.125, 0.0, 0.0, 0.0]


def definition_of(family: Family, vocab_size: int = 8) -> Definition:
    return flashinfer_trace.load(f"{family.name}_v129280").with_const_axes({"vocab_size": vocab_size})


def case(row: list[float], draws: int = 4096, **parameters: float) -> dict[str, Any]:
    """`draws` copies of one row with its parameters, in the order of the interfaces."""
    inputs: dict[str, Any] = {"probs": torch.tensor([row], dtype=torch.float32).expand(draws, -1).contiguous()}
    for name, value in parameters.items():
        inputs[name] = torch.full((draws,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
    return inputs
