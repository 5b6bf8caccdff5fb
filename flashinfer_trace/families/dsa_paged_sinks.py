"""Sparse attention with sinks and lengths, whose keys are the values: DeepSeek-V4's prefill."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families import dsa_paged
from flashinfer_trace.families.attention.cases import EDGES, SCALES, softmax_scale, usual_scale
from flashinfer_trace.families.attention.oracle import expected_outputs
from flashinfer_trace.families.attention.policies import OUTPUT, Rounding, kernel_policies
from flashinfer_trace.families.attention.variants import (
    LOST,
    SINK_SCALE,
    below_the_sink,
    chunks_at_any_place,
    with_flushed_weights,
    with_sinks,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import Expected

PLAN = RowPlans(
    {
        "num_tokens": dsa_paged.PLAN.counts["num_tokens"],
        "num_slots": Count(
            20, 3000, least=1, usual=lambda definition, axes: 2 * definition.const_axes["topk"], corner=17
        ),
    },
    {**dsa_paged.PLAN.choices, "cut": FLAG},
    special=[
        {"choice": "one", "num_tokens": 8, "scale": SCALES[2], "cut": True},
        {"choice": "any", "logits": "beyond_float16", "scale": SCALES[1]},
        {"choice": "any", "cut": True},
    ],
    # It is not known what kernels give tokens that choose nothing, nor what they round beyond float32's range.
    on_cpu=[
        {"choice": "some", "nothing": dsa_paged.NOTHING[1], "cut": True},
        {"choice": "any", "logits": "vast"},
        {"choice": "any", "num_tokens": 300, "logits": EDGES, "scale": SCALES[1]},
    ],
    many_rows=0,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows that are cut still have a key, if they had one."""
    axes, slots = definition.const_axes, plan["num_slots"]
    topk, sm_scale = axes["topk"], softmax_scale(axes["head_dim"], plan["scale"])
    indices = dsa_paged.chosen_slots({**plan, "num_pages": slots}, slots, topk, draws)
    q, kv = dsa_paged.drawn(plan, draws, axes["num_qo_heads"], axes["head_dim"], slots, indices, sm_scale)
    first = (indices >= 0).int().argmax(dim=1)
    cut = first + 1 + (draws.uniform([len(indices)]) * (topk - first)).long()
    return {
        "q": q,
        "kv": kv,
        "sparse_indices": indices,
        "topk_length": (cut.clamp_max(topk) if plan["cut"] else torch.full_like(cut, topk)).to(torch.int32),
        "sinks": draws.normal([axes["num_qo_heads"]], scale=SINK_SCALE),
        "sm_scale": sm_scale,
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    kv, indices = inputs["kv"].unsqueeze(1), inputs["sparse_indices"]
    place = torch.arange(indices.shape[1], device=indices.device)
    chosen = indices.masked_fill(place >= inputs["topk_length"][:, None], -1)
    memory = dsa_paged.chosen_memory(chosen, kv, kv)
    q, memory = with_sinks(inputs["q"], memory, inputs["sinks"], inputs["sm_scale"])
    output = expected_outputs(q, memory, inputs["sm_scale"], False, chunks_at_any_place())["output"]
    below = below_the_sink(output, inputs["sinks"])
    return {"output": replace(output, parts={**output.parts, LOST: torch.where(below, output.parts["weighted"], 0.0)})}


def run_flash_mla(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flash_mla import flash_mla_sparse_fwd

    heads, scale = definition.const_axes["num_qo_heads"], float(inputs["sm_scale"])
    pad = -heads % dsa_paged.BLOCK_HEADS
    q = torch.nn.functional.pad(inputs["q"].contiguous(), (0, 0, 0, pad))
    sinks = torch.nn.functional.pad(inputs["sinks"], (0, pad))
    rows = inputs["kv"].unsqueeze(1), inputs["sparse_indices"].unsqueeze(1)
    found = flash_mla_sparse_fwd(q, *rows, scale, q.shape[2], attn_sink=sinks, topk_length=inputs["topk_length"])
    return {"output": found[0][:, :heads].contiguous()}


FAMILIES = (
    Family(
        name="dsa_sparse_attention_sinks",
        op_type="dsa_paged",
        twin={"num_qo_heads": 4, "head_dim": 64, "topk": 10},
        plan=PLAN,
        make_inputs=make_inputs,
        strided=("q",),
        isolated=("q",),
        oracle=oracle,
        compare={"output": OUTPUT},
        kernels=(
            Kernel(
                "flash_mla.flash_mla_sparse_fwd",
                run_flash_mla,
                limits={"num_tokens": (1, 1 << 20), "num_slots": (1, 1 << 30)},
                plan_options=dsa_paged.SparseOptions(keyless=False, any_negative=False),
                # Whether it sums weights before or after it rounds them is not known: the bound allows both.
                compare={
                    "output": with_flushed_weights(
                        kernel_policies(Rounding(weights=True, sum=True, partial=0))["output"]
                    )
                },
            ),
        ),
        faults=(
            usual_scale(),
            with_inputs("sinks ignored", lambda inputs, trial: {**inputs, "sinks": inputs["sinks"] * 0 - 1e30}),
        ),
    ),
)
