"""RMSNorm of each head of queries and keys in one kernel, in place."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.rmsnorm import CORNER_WEIGHTS, EPSILONS, NORMALISED, normalise, weights
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws, sizes
from flashinfer_trace.harness.many_rows import BEYOND_1024

MODULE = "sglang.jit_kernel.norm"
HEAD_DIMS = (64, 128, 256, 512, 1024)


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    return st.fixed_dictionaries(
        {
            "num_tokens": sizes(*request.range("num_tokens", 0, 24, 1024)),
            "values": st.sampled_from(VALUE_KINDS),
            "zero_row": st.booleans(),
        }
    )


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    return {"num_tokens": axes.get("num_tokens", 8), "values": "normal", "zero_row": False}


def corners(request: PlanRequest) -> list[Plan]:
    """Heads and weights at the ends of float16's range, and heads whose squares are beyond float32's."""
    low, high = request.range("num_tokens", 0, 24, 1024)
    return [{"num_tokens": max(low, min(3, high)), "values": values, "zero_row": False} for values in CORNER_WEIGHTS]


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Heads of the planned kind, and weights around 1; of one token in the middle, all heads may be zeros."""
    axes, tokens = definition.const_axes, plan["num_tokens"]
    inputs = {}
    for name, heads in (("q", axes["num_qo_heads"]), ("k", axes["num_kv_heads"])):
        inputs[name] = draws.values([tokens, heads, axes["head_dim"]], torch.bfloat16, plan["values"])
        if plan["zero_row"] and tokens:
            inputs[name][tokens // 2] = 0
    for name in ("q_weight", "k_weight"):
        inputs[name] = weights(axes["head_dim"], plan["values"], draws).to(torch.bfloat16)
    return inputs


def oracle(eps: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    outputs = {}
    for name in ("q", "k"):
        heads = inputs[name].double().flatten(0, 1)
        normal = normalise(heads, inputs[f"{name}_weight"], eps)
        outputs[f"{name}_out"] = Expected(normal.value.view(inputs[name].shape), normal.parts)
    return outputs


def run_sglang(eps: float, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.jit_kernel.norm import fused_inplace_qknorm

    fused_inplace_qknorm(inputs["q"], inputs["k"], inputs["q_weight"], inputs["k_weight"], eps)
    return {"q_out": inputs["q"], "k_out": inputs["k"]}


def compiled_dim(definition: Definition) -> str | None:
    return None if definition.const_axes["head_dim"] in HEAD_DIMS else f"needs head_dim in {HEAD_DIMS}"


def family(suffix: str, eps: float) -> Family:
    """The record of one epsilon."""
    return Family(
        name=f"fused_qknorm{suffix}",
        op_type="rmsnorm",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        plans=plans,
        corners=corners,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        many_rows=BEYOND_1024,
        oracle=functools.partial(oracle, eps),
        compare={"q_out": NORMALISED, "k_out": NORMALISED},
        kernels=(
            Kernel(
                f"{MODULE}.fused_inplace_qknorm",
                "sglang",
                functools.partial(run_sglang, eps),
                min_capability=(8, 0),
                limits={"num_tokens": (1, 1 << 20)},
                supports=compiled_dim,
                in_place=("q", "k"),
                modules=(MODULE,),
                optional=True,
            ),
        ),
    )


FAMILIES = tuple(family(suffix, eps) for suffix, eps in EPSILONS.items())
