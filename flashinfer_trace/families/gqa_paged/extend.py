"""Causal attention of new tokens to themselves and to a cached prefix: SGLang's Triton attention for prefill.

From its source (SGLang 0.5.23, kernels/ops/attention/extend_attention.py): a first loop goes over the cached
tokens, a second one over the new ones. Weights are summed in float32 and rounded to bf16 for the product with the
values; nothing is split, and no lse is returned. Loads beyond the end of a request are masked, so NaN does not leak.

Its variants have capped logits, a window of keys, or sinks. sliding_window_size counts the keys before a query's own
one; tiles of keys that no query of a block sees are skipped. Caps and sinks are computed as in `variants`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from flashinfer_trace.families.attention import cases, flash_attention, triton, variants
from flashinfer_trace.families.attention.kernels import BATCHES, QUERIES
from flashinfer_trace.families.attention.oracle import Memory, any_chunks, expected_outputs
from flashinfer_trace.families.attention.policies import OUTPUT, kernel_policies
from flashinfer_trace.families.calls import called
from flashinfer_trace.families.gqa_paged.variants import with_cap, with_cap_error
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr
from flashinfer_trace.harness.layouts import LAYOUT, NAN_ROW
from flashinfer_trace.verdict.compare import ErrorBound, Expected

MODULE = "sglang.kernels.ops.attention.extend_attention"
#: Every query has at least its own key.
OPTIONS = cases.AttentionOptions(unseeing_rows=False, keyless=False, keyless_requests=False)


def corners(request: PlanRequest) -> list[Plan]:
    """Those of `corner_lengths`; on a CPU, the second one has a request without queries in the middle, and another one
    has requests without cached tokens, and no slots at all."""
    found = cases.corner_lengths(request)
    if not request.large:
        found[1] |= {"kv_lens": [300, 6, 40], "q_lens": [5, 0, 9]}
        found.append({"kv_lens": [6, 9], "logits": "normal", "scale": cases.SCALES[0], "q_lens": [6, 9]})
    return found


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, device, kind = definition.const_axes, draws.device, plan["logits"]
    heads, kv_heads, qk_dim, vo_dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "qk_dim", "vo_dim"))
    table, q_lens, sm_scale = (
        cases.page_table(definition, plan, draws),
        plan["q_lens"],
        cases.softmax_scale(qk_dim, plan["scale"]),
    )
    slots, new = table.num_pages, sum(q_lens)
    keys = draws.normal((slots + new, kv_heads, qk_dim), torch.bfloat16, cases.value_scale(kind))
    values = draws.normal((slots + new, kv_heads, vo_dim), torch.bfloat16, cases.value_scale(kind))
    if kind == "positive":
        values.abs_()
    q = draws.normal([new, heads, qk_dim], scale=cases.query_scale(kind))
    cases.give_signs(kind, q, keys)
    cases.add_peaks(kind, q, keys, q_lens, plan["kv_lens"], sm_scale, draws, places(table, q_lens))
    buffers = {"k_buffer": keys[:slots].unsqueeze(1), "v_buffer": values[:slots].unsqueeze(1)}
    for buffer in buffers.values():
        cases.spoil_unused(buffer, table.used(device), plan["unused"])
    if plan.get(LAYOUT) == NAN_ROW:
        cases.spoil_request(table, q_lens, q, list(buffers.values()))
        for new_rows in (keys[slots:], values[slots:]):
            new_rows.masked_fill_(q[:, :1, :1].isnan(), math.nan)
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


def places(table: cases.PageTable, q_lens: list[int]) -> torch.Tensor:
    """Where the keys of all requests are among those of all slots and the new ones: int64, on the CPU."""
    found = []
    for request, (first, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(q_lens)])):
        found += [*table.pages[request], *range(table.num_pages + first, table.num_pages + end)]
    return torch.tensor(found, dtype=torch.int64)


def memory(inputs: Inputs) -> Memory:
    starts, offsets, indices = inputs["kv_indptr"], inputs["qo_indptr"], inputs["kv_indices"]
    queries, cached = torch.stack([offsets, starts]).tolist()
    lengths = [end - first for first, end in itertools.pairwise(cached)]
    lengths = [old + end - first for old, (first, end) in zip(lengths, itertools.pairwise(queries), strict=True)]
    # One slot more, so there is something to look up where no request has cached tokens.
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
    offsets, axes = inputs["qo_indptr"].long(), definition.const_axes
    given = {
        **{"offsets": offsets, "indices": inputs["kv_indices"].long(), "longest": int(offsets.diff().max())},
        **{"cap": float(axes.get("logits_soft_cap", 0)), "window": axes.get("window_size", 0) - 1},
    }
    text = (
        "q k v output k_buffer v_buffer offsets kv_indptr indices None True None longest 1.0 1.0 sm_scale= "
        "logit_cap=cap sliding_window_size=window sinks=|None"
    )
    called(f"{MODULE}.extend_attention_fwd", text, definition, {**inputs, **outputs, **given})
    return outputs


def run_flash_attention(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """FlashAttention 3 as SGLang calls it: new keys and values are in the cache before. Here they lie behind it."""
    offsets, starts, indices = inputs["qo_indptr"], inputs["kv_indptr"], inputs["kv_indices"]
    cached = starts.diff()[:, None]
    lengths = cached + offsets.diff()[:, None]
    column = torch.arange(int(lengths.max()), device=offsets.device)
    # One slot more, so there is something to look up where no request has cached tokens.
    old = torch.nn.functional.pad(indices, (0, 1))[(starts[:-1, None] + column).clamp_max(len(indices))]
    new = len(inputs["k_buffer"]) + offsets[:-1, None] + column - cached
    table = torch.where(column < cached, old, new).masked_fill(column >= lengths, 0).to(torch.int32)
    caches = [torch.cat((inputs[f"{name}_buffer"], inputs[name])).unsqueeze(1) for name in "kv"]
    where = table, lengths[:, 0].to(torch.int32)
    found = flash_attention.on_table(definition, inputs, inputs["q"], (caches[0], caches[1]), *where)
    return {"output": found["output"]}


def kernel(path: str, call: KernelCall) -> Kernel:
    """Both kernels round the weights after they are summed, and keep partial outputs in float32."""
    policies = {"output": kernel_policies(triton.ROUNDING)["output"]}
    return Kernel(path, call, limits={**BATCHES, **QUERIES, "num_slots": (1, 1 << 30)}, compare=policies)


PLAIN_FAMILIES = (
    Family(
        name="gqa_extend_causal",
        op_type="gqa_paged",
        twin={"num_qo_heads": 6, "num_kv_heads": 2, "qk_dim": 64, "vo_dim": 48},
        plan=cases.Requests("num_slots", corners, OPTIONS),
        make_inputs=make_inputs,
        strided=("q", "k", "v", "k_buffer", "v_buffer"),
        isolated=("q",),
        oracle=oracle,
        compare={"output": OUTPUT},
        kernels=(
            kernel(f"{MODULE}.extend_attention_fwd", run_triton),
            kernel(flash_attention.PAGED_PATH, run_flash_attention),
        ),
        faults=(cases.usual_scale(),),
    ),
)

(PLAIN,) = PLAIN_FAMILIES


def oracle_of_variant(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output; where logits are capped, its parts have the cap as well."""
    found = variants.expected_of_variant(definition, inputs, memory(inputs), True)["output"]
    return with_cap(definition, {"output": found})


def corners_of_variant(request: PlanRequest) -> list[Plan]:
    """Those of every variant; on a CPU also one with more keys than any plan draws, since its window is small."""
    long: Plan = {"kv_lens": [2600, 3], "q_lens": [2, 1], "logits": "normal", "scale": cases.SCALES[0]}
    return [*variants.corner_plans(PLAIN, request), *([] if request.large else [long])]


def kernel_of(kernel: Kernel, variant: str) -> Kernel:
    """A kernel of the plain family, with the bounds of one variant."""
    policy = kernel.compare["output"]
    assert isinstance(policy, ErrorBound)
    if "softcap" in variant:
        fast = kernel.path == flash_attention.PAGED_PATH
        policy = variants.with_error(policy, variants.cap_error, variants.TANH) if fast else with_cap_error(policy)
    if "sinks" in variant:
        policy = variants.with_flushed_weights(policy)
    return replace(kernel, compare={"output": policy})


FAMILIES = (
    PLAIN,
    *(
        replace(
            variants.variant_family(PLAIN, variant, (), oracle_of_variant),
            plan=PLAIN.plan.with_corners(corners_of_variant),
            kernels=tuple(kernel_of(kernel, variant) for kernel in PLAIN.kernels),
        )
        for variant in variants.TWINS
    ),
)
