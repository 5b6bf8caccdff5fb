"""Sparse attention of DeepSeek-V3.2: the indexer's top-k in three forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from flashinfer_trace.families.sparse_attention.rows import Rows, corners, make_inputs, plan_for_axes, plans
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.plans import OwnPlans
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.unordered import TopK

#: No kernel launches for zero rows.
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
#: SGLang's kernels of DeepSeek-V4, which select by the bits of float32 scores.
V2 = "sglang.kernels.ops.attention.dsv4.topk"
TOP = TopK("which of equal scores are listed, and the order, are not defined; scores are compared, not computed")


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
    if "page_table" not in inputs or len(inputs["page_table"]) < 2:
        return None
    table = inputs["page_table"]
    return {**inputs, "page_table": table[:1].expand_as(table).contiguous()}


FAULTS = (
    with_inputs("row_starts ignored", lambda inputs, trial: without_starts(inputs)),
    with_inputs("the last key ignored", lambda inputs, trial: one_key_fewer(inputs)),
    with_inputs("the first sequence's page table for all", lambda inputs, trial: first_table(inputs)),
)


def run_positions(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    top_k = definition.const_axes["top_k"]
    return {"topk_indices": sgl_kernel.fast_topk_v2(inputs["scores"], inputs["lengths"], top_k, inputs["row_starts"])}


def run_slots(decode: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Without row_starts, and with one row a sequence, another kernel runs: that of decoding."""
    import sgl_kernel

    slots = sgl_kernel.fast_topk_transform_fused(
        inputs["scores"],
        inputs["lengths"],
        inputs["page_table"],
        inputs["cu_seqlens_q"],
        definition.const_axes["top_k"],
        None if decode else inputs["row_starts"],
    )
    return {"topk_slots": slots}


def run_rows(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import sgl_kernel

    rows = sgl_kernel.fast_topk_transform_ragged_fused(
        inputs["scores"],
        inputs["lengths"],
        inputs["topk_indices_offset"],
        definition.const_axes["top_k"],
        inputs["row_starts"],
    )
    return {"topk_rows": rows}


def run_paged_v2(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it in decode, with pages of one token. Rows of scores must begin at whole vectors of four."""
    from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2, topk_transform_paged_v2

    scores, lengths, found = whole_vectors(inputs["scores"]), inputs["lengths"], outputs["topk_slots"]
    topk_transform_paged_v2(scores, lengths, inputs["page_table"], found, 1, plan_topk_v2(lengths))
    return outputs


def run_ragged_v2(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """It overwrites up to three scores before a row's first key, so it gets a copy."""
    from sglang.kernels.ops.attention.dsv4.topk import topk_transform_ragged_v2

    scores, found = whole_vectors(inputs["scores"].clone()), outputs["topk_rows"]
    offsets, starts = inputs["topk_indices_offset"], inputs["row_starts"]
    topk_transform_ragged_v2(scores, inputs["lengths"], out_offsets=offsets, out_indices=found, row_starts=starts)
    return outputs


def whole_vectors(scores: torch.Tensor) -> torch.Tensor:
    """The scores with rows of a multiple of four columns in memory, and of four at least."""
    columns = scores.shape[1]
    return torch.nn.functional.pad(scores, (0, 4 - columns % 4))[:, :columns]


def topk_kernel(
    name: str, call: Callable[[Definition, Inputs, Outputs], Outputs], variant: str = "", *, decode: bool = False
) -> Kernel:
    """A kernel of sgl-kernel, which needs 128 KiB of shared memory. It sorts scores into bins by the upper 8 bits of
    their float16 form and keeps at most 4096 of the bin that the last listed score is in: beyond, it lists wrong ones
    (findings/kernels.json), so it gets no rows that crowd one bin. It refuses more sequences than rows."""
    return Kernel(
        f"sgl_kernel.{name}",
        call,
        variant=variant,
        limits=LAUNCHABLE,
        plan_options=Rows(crowded=False, decode=decode, idle=False),
    )


def topk_family(name: str, output: str, kernels: tuple[Kernel, ...]) -> Family:
    return Family(
        name=name,
        op_type="sparse_attention",
        twin={"top_k": 8},
        plan=OwnPlans(plans, plan_for_axes, corners),
        make_inputs=make_inputs,
        oracle=functools.partial(oracle, output),
        compare={output: TOP},
        kernels=kernels,
        faults=FAULTS,
    )


FAMILIES = (
    topk_family("fast_topk_v2", "topk_indices", (topk_kernel("fast_topk_v2", run_positions),)),
    topk_family(
        "fast_topk_transform_fused",
        "topk_slots",
        (
            topk_kernel("fast_topk_transform_fused", functools.partial(run_slots, False)),
            topk_kernel("fast_topk_transform_fused", functools.partial(run_slots, True), "decode", decode=True),
            Kernel(
                f"{V2}.topk_transform_paged_v2",
                run_paged_v2,
                limits=LAUNCHABLE,
                plan_options=Rows(decode=True, idle=False),
            ),
        ),
    ),
    topk_family(
        "fast_topk_transform_ragged_fused",
        "topk_rows",
        (
            topk_kernel("fast_topk_transform_ragged_fused", run_rows),
            Kernel(f"{V2}.topk_transform_ragged_v2", run_ragged_v2, limits=LAUNCHABLE, plan_options=Rows(idle=False)),
        ),
    ),
)
