"""Sparse attention of DeepSeek-V3.2: the indexer's top-k in three forms."""

from __future__ import annotations

import functools
from collections.abc import Callable

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.sparse_attention.rows import Rows, corners, make_inputs, plan_for_axes, plans
from flashinfer_trace.families.sparse_attention.scores import FAULTS, oracle
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.harness.unordered import TopK

#: The kernels are built for DeepSeek-V3.2's number of keys, and none launches for zero rows.
BUILT_FOR = {"top_k": 2048}
LAUNCHABLE = {"num_tokens": (1, 1 << 20)}
TOP = TopK("which of equal scores are listed, and the order, are not defined; scores are compared, not computed")


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


def topk_kernel(
    name: str, call: Callable[[Definition, Inputs, Outputs], Outputs], variant: str = "", *, decode: bool = False
) -> Kernel:
    """A kernel of sgl-kernel, which needs 128 KiB of shared memory.

    It sorts scores into bins by the upper 8 bits of their float16 form and keeps at most 4096 of the bin that the last
    listed score is in: beyond, it lists wrong ones (docs/kernel_findings.md), so it gets no rows that crowd one bin.
    It refuses more sequences than rows.
    """
    return Kernel(
        f"sgl_kernel.{name}",
        "sglang-kernel",
        call,
        variant=variant,
        min_capability=(9, 0),
        limits=LAUNCHABLE,
        const_axes=BUILT_FOR,
        plan_options=Rows(crowded=False, decode=decode, idle=False),
    )


def topk_family(name: str, output: str, kernels: tuple[Kernel, ...]) -> Family:
    return Family(
        name=name,
        op_type="sparse_attention",
        twin={"top_k": 8},
        plans=plans,
        corners=corners,
        plan_for_axes=plan_for_axes,
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
        ),
    ),
    topk_family(
        "fast_topk_transform_ragged_fused",
        "topk_rows",
        (topk_kernel("fast_topk_transform_ragged_fused", run_rows),),
    ),
)
