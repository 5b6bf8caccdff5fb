"""What the indexer's top-k must list: the scores of all that may be listed, by the number that stands for it."""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.harness.faults import with_inputs

__all__ = ["FAULTS", "oracle"]


def numbers_of_keys(inputs: Inputs, row: int) -> torch.Tensor:
    """int64: what stands for each key of a row in the output: its position, its slot, or its row among all keys."""
    length = int(inputs["lengths"][row])
    if "page_table" in inputs:
        ends = inputs["cu_seqlens_q"][1:].tolist()
        sequence = next(s for s, end in enumerate(ends) if row < end)
        slots: torch.Tensor = inputs["page_table"][sequence, :length].long()
        return slots
    offset = int(inputs["topk_indices_offset"][row]) if "topk_indices_offset" in inputs else 0
    return torch.arange(offset, offset + length, device=inputs["scores"].device)


def oracle(output: str, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Row by row: a full sort of the row's keys, of which the first top_k are listed. Part ``scores``, by number."""
    top_k, scores = definition.const_axes["top_k"], inputs["scores"]
    numbers = [numbers_of_keys(inputs, row) for row in range(len(scores))]
    largest = max((int(each.max()) for each in numbers if len(each)), default=0)
    by_number = torch.full((len(scores), largest + 1), -math.inf, dtype=torch.float64, device=scores.device)
    value = torch.full((len(scores), top_k), -1, dtype=torch.int64, device=scores.device)
    starts = inputs["row_starts"].tolist()
    for row, number in enumerate(numbers):
        own = scores[row, starts[row] : starts[row] + len(number)].double()
        by_number[row, number] = own
        chosen = number[own.sort(descending=True, stable=True).indices[:top_k]]
        value[row, : len(chosen)] = chosen
    return {output: Expected(value, {"scores": by_number})}


def without_starts(inputs: dict[str, Any]) -> dict[str, Any] | None:
    starts = inputs["row_starts"]
    return {**inputs, "row_starts": torch.zeros_like(starts)} if starts.any() else None


def one_key_fewer(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "lengths": (inputs["lengths"] - 1).clamp_min(0)}


def first_table(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The page table of the first sequence for all."""
    if "page_table" not in inputs or len(inputs["page_table"]) < 2:
        return None
    table = inputs["page_table"]
    return {**inputs, "page_table": table[:1].expand_as(table).contiguous()}


FAULTS = (
    with_inputs("row_starts ignored", lambda inputs, trial: without_starts(inputs)),
    with_inputs("the last key ignored", lambda inputs, trial: one_key_fewer(inputs)),
    with_inputs("the first sequence's page table for all", lambda inputs, trial: first_table(inputs)),
)
