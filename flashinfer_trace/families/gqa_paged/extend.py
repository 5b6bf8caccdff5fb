"""Causal attention of new tokens to themselves and to a cached prefix: SGLang's Triton attention for prefill.

From its source (SGLang 0.5.11, srt/layers/attention/triton_ops/extend_attention.py): a first loop goes over the cached
tokens, a second one over the new ones. Weights are summed in float32 and rounded to bf16 for the product with the
values; nothing is split, and no lse is returned. Loads beyond the end of a request are masked, so NaN does not leak.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.families.attention import triton
from flashinfer_trace.families.attention.cases import (
    SCALES,
    AttentionOptions,
    add_peaks,
    any_scale,
    batch_size_of,
    corner_lengths,
    give_signs,
    lengths,
    lengths_for_axes,
    query_scale,
    softmax_scale,
    usual_scale,
    value_scale,
)
from flashinfer_trace.families.attention.kernels import BATCHES, QUERIES
from flashinfer_trace.families.attention.oracle import any_chunks, expected_outputs
from flashinfer_trace.families.attention.paged import (
    IN_A_ROW,
    UNUSED_KINDS,
    PageTable,
    allocate_pages,
    distinct_pages,
    spoil_unused,
)
from flashinfer_trace.families.attention.policies import OUTPUT, kernel_policies
from flashinfer_trace.families.attention.tiles import Memory
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, split

__all__ = ["FAMILIES"]

MODULE = "sglang.srt.layers.attention.triton_ops.extend_attention"
#: Every query has at least its own key.
OPTIONS = AttentionOptions(unseeing_rows=False, keyless=False, keyless_requests=False)


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    """Lengths of new and of all tokens, slots, kinds and scale of one case."""
    return any_scale(_plans(request))


@st.composite
def _plans(draw: Callable[[Any], Any], request: PlanRequest) -> Plan:
    tile = 64 if request.large else 4
    plan: Plan = draw(lengths(dataclasses.replace(request, plan_options=OPTIONS), tile, True))
    plan["shared_prefix"] = draw(st.sampled_from([0, 0, 1, 3]))
    least = request.limits.get("num_slots", (0, 0))[0]
    needed = distinct_pages(cached_lengths(plan), 1, plan["shared_prefix"])
    plan["num_slots"] = max(least, needed + draw(st.integers(0, 3)))
    plan["unused"] = draw(st.sampled_from(UNUSED_KINDS))
    return plan


def cached_lengths(plan: Plan) -> list[int]:
    """Cached tokens of each request."""
    return [total - new for total, new in zip(plan["kv_lens"], plan["q_lens"], strict=True)]


def corners(request: PlanRequest) -> list[Plan]:
    """Those of `corner_lengths`; on a CPU, the second one has a request without queries in the middle, and another one
    has requests without cached tokens, and no slots at all."""
    found = corner_lengths(dataclasses.replace(request, plan_options=OPTIONS), True)
    if not request.large:
        found[1] |= {"kv_lens": [300, 6, 40], "q_lens": [5, 0, 9]}
        found.append({"kv_lens": [6, 9], "logits": "normal", "scale": SCALES[0], "q_lens": [6, 9]})
    return [
        {**plan, "shared_prefix": 0, "unused": "nan", "num_slots": distinct_pages(cached_lengths(plan), 1, 0)}
        for plan in found
    ]


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    """By default, up to 64 cached tokens of each request."""
    batch = batch_size_of(axes)
    plan = lengths_for_axes(axes, None, True, draws)
    cached = plan["kv_lens"] if "num_kv_indices" not in axes else split(axes["num_kv_indices"], batch, draws)
    if axes.get("num_slots") == 0 and "num_kv_indices" not in axes:
        cached = [0] * batch
    plan["kv_lens"] = [old + new for old, new in zip(cached, plan["q_lens"], strict=True)]
    slots = axes.get("num_slots", distinct_pages(cached, 1))
    return {**plan, "shared_prefix": 0, "unused": "nan", "num_slots": slots}


def table_of(definition: Definition, plan: Plan, draws: Draws) -> PageTable:
    """The slots of the cached tokens.

    Raises:
        InputError: the plan has cached tokens, but no slots to hold them.
    """
    try:
        shared, in_a_row = plan["shared_prefix"], plan["logits"] in IN_A_ROW
        return allocate_pages(cached_lengths(plan), 1, plan["num_slots"], shared, draws, in_a_row)
    except ValueError as error:
        raise InputError(f"{definition.name}: {error}") from error


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Normal queries, keys and values of the planned kind; slots that belong to no request are NaN or stale."""
    axes, device, kind = definition.const_axes, draws.device, plan["logits"]
    heads, kv_heads, qk_dim, vo_dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "qk_dim", "vo_dim"))
    table, q_lens, sm_scale = table_of(definition, plan, draws), plan["q_lens"], softmax_scale(qk_dim, plan["scale"])
    slots, new = table.num_pages, sum(q_lens)
    keys = draws.normal((slots + new, kv_heads, qk_dim), torch.bfloat16, value_scale(kind))
    values = draws.normal((slots + new, kv_heads, vo_dim), torch.bfloat16, value_scale(kind))
    if kind == "positive":
        values.abs_()
    q = draws.normal([new, heads, qk_dim], scale=query_scale(kind))
    give_signs(kind, q, keys)
    if kind == "peaked":
        add_peaks(q, keys, q_lens, plan["kv_lens"], sm_scale, draws, places(table, q_lens))
    buffers = {"k_buffer": keys[:slots].unsqueeze(1), "v_buffer": values[:slots].unsqueeze(1)}
    for buffer in buffers.values():
        spoil_unused(buffer, table.used(device), plan["unused"])
    inputs = {
        "q": q.to(torch.bfloat16),
        "k": keys[slots:].contiguous(),
        "v": values[slots:].contiguous(),
        **{name: buffer.squeeze(1).contiguous() for name, buffer in buffers.items()},
        "qo_indptr": indptr(q_lens, device),
        "kv_indptr": table.indptr(device),
        "kv_indices": table.indices(device),
        "sm_scale": sm_scale,
    }
    return {name: inputs[name] for name in definition.inputs}


def places(table: PageTable, q_lens: list[int]) -> torch.Tensor:
    """Where the keys of all requests are among those of all slots and the new ones: int64, on the CPU."""
    found = []
    for request, (first, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(q_lens)])):
        found += [*table.pages[request], *range(table.num_pages + first, table.num_pages + end)]
    return torch.tensor(found, dtype=torch.int64)


def memory(inputs: Inputs) -> Memory:
    """Where the keys and values of the requests are: cached ones, then new ones."""
    starts, offsets, indices = inputs["kv_indptr"], inputs["qo_indptr"], inputs["kv_indices"]
    queries, cached = torch.stack([offsets, starts]).tolist()
    lengths = [end - first for first, end in itertools.pairwise(cached)]
    lengths = [old + end - first for old, (first, end) in zip(lengths, itertools.pairwise(queries), strict=True)]
    # One slot more, so that there is something to look up where no request has cached tokens.
    known = torch.nn.functional.pad(indices.long(), (0, 1))

    def slots(request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        length = (starts[1:] - starts[:-1])[request]
        old = known[(starts[request] + position).clamp_max(len(indices))]
        return torch.where(position < length, old, len(inputs["k_buffer"]) + offsets[request] + position - length)

    keys = torch.cat((inputs["k_buffer"], inputs["k"]))
    return Memory(keys, torch.cat((inputs["v_buffer"], inputs["v"])), queries, lengths, slots)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    found = expected_outputs(inputs["q"], memory(inputs), inputs["sm_scale"], True, any_chunks())
    return {"output": found["output"]}


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return call_triton(inputs, outputs)


def call_triton(inputs: Inputs, outputs: Outputs, **options: Any) -> Outputs:
    """Calls the kernel with `options` for the logits, as SGLang names them."""
    from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

    names = ("q", "k", "v", "k_buffer", "v_buffer")
    q, k, v, k_buffer, v_buffer = (inputs[name] for name in names)
    offsets = inputs["qo_indptr"].long()
    extend_attention_fwd(
        q,
        k,
        v,
        outputs["output"],
        k_buffer,
        v_buffer,
        offsets,
        inputs["kv_indptr"],
        inputs["kv_indices"].long(),
        None,
        True,
        None,
        int(offsets.diff().max()),
        1.0,
        1.0,
        sm_scale=float(inputs["sm_scale"]),
        **options,
    )
    return outputs


FAMILIES = (
    Family(
        name="gqa_extend_causal",
        op_type="gqa_paged",
        twin={"num_qo_heads": 6, "num_kv_heads": 2, "qk_dim": 64, "vo_dim": 48},
        plans=plans,
        corners=corners,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT},
        kernels=(
            Kernel(
                f"{MODULE}.extend_attention_fwd",
                "sglang",
                run_triton,
                min_capability=(8, 0),
                limits={**BATCHES, **QUERIES, "num_slots": (1, 1 << 30)},
                compare={"output": kernel_policies(triton.ROUNDING)["output"]},
                modules=(MODULE,),
                optional=True,
            ),
        ),
        faults=(usual_scale(),),
    ),
)
