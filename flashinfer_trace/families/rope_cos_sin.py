"""Rotary position embedding by the cosines and sines of each token, as models that are written in PyTorch apply it."""

from __future__ import annotations

from typing import Any

import torch

from flashinfer_trace.families.rope import LAUNCHABLE, ROTATED, THETAS, make_cache
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Expected

#: As in `rope`; ``any``: a cosine and a sine for each feature, those of a pair not alike.
ROWS = ("rotary", "scaled", "quarter_turns", "any")
MODULE = "sglang.srt.layers.rotary_embedding.utils"


#: The corners have states at the ends of float16's range.
PLAN = RowPlans(
    {"num_tokens": Count(24, 4096, corner=5)},
    {"values": VALUE_KINDS, "rows": ROWS, "theta": THETAS},
    special=[{"values": values} for values in ("huge", "minute")],
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Queries and keys of the planned kind; cosines and sines of consecutive positions, from a random one on."""
    axes, tokens = definition.const_axes, plan["num_tokens"]
    size = axes["head_size"]
    inputs: dict[str, Any] = {
        name: draws.values([axes[heads], tokens, size], torch.bfloat16, plan["values"])
        for name, heads in (("q", "num_qo_heads"), ("k", "num_kv_heads"))
    }
    if plan["rows"] == "any":
        rows = {name: draws.normal([tokens, size], torch.bfloat16) for name in ("cos", "sin")}
    else:
        first = draws.host_integers(1, 0, 1000)[0]
        kind = {"cache": plan["rows"], "max_seq_len": first + tokens, "bfloat16_cache": True, "theta": plan["theta"]}
        cos, sin = make_cache(kind, size, draws)[first:].to(torch.bfloat16).chunk(2, dim=1)
        rows = {"cos": torch.cat((cos, cos), dim=1), "sin": torch.cat((sin, sin), dim=1)}
    return {**inputs, **rows}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each feature and its partner, half a head away, as a product with a column of cosine and signed sine."""
    half = definition.const_axes["head_size"] // 2
    sign = torch.ones(2 * half, dtype=torch.float64, device=inputs["sin"].device)
    sign[:half] = -1
    column = torch.stack((inputs["cos"].double(), inputs["sin"].double() * sign), dim=2)
    exact = bool(((column == 0) | (column.abs() == 1)).all() and (column.abs().sum(dim=2) == 1).all())
    outputs = {}
    for name in ("q", "k"):
        states = inputs[name].double()
        pairs = torch.stack((states, states.roll(half, dims=2)), dim=3)
        value = torch.einsum("htdp,tdp->htd", pairs, column)
        magnitude = torch.einsum("htdp,tdp->htd", pairs.abs(), column.abs())
        outputs[f"{name}_out"] = Expected(
            value, {"magnitude": magnitude, "copied": torch.zeros_like(value)}, exact and value.numel() > 0
        )
    return outputs


def run_sglang(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's function without its decorator torch.compile: PyTorch step by step, for a batch of one sequence."""
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_pos_emb_native

    with torch.compiler.set_stance("force_eager"):
        q, k = apply_rotary_pos_emb_native(*(inputs[name].unsqueeze(0) for name in ("q", "k", "cos", "sin")))
    return {"q_out": q.squeeze(0), "k_out": k.squeeze(0)}


FAMILIES = (
    Family(
        name="rope_with_cos_sin",
        op_type="rope",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_size": 16},
        plan=PLAN,
        make_inputs=make_inputs,
        strided=("q", "k"),
        oracle=oracle,
        compare={"q_out": ROTATED, "k_out": ROTATED},
        kernels=(Kernel(f"{MODULE}.apply_rotary_pos_emb_native", run_sglang, variant="eager", limits=LAUNCHABLE),),
    ),
)
