"""RMSNorm of each head of queries and keys in one kernel, in place."""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families import rmsnorm
from flashinfer_trace.families.rmsnorm import EPSILONS, NORMALIZED, normalize, weights
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import Expected

MODULE = "sglang.kernels.ops.layernorm.norm"


#: The corners have heads and weights at the ends of float16's range, and heads whose squares are beyond float32's.
PLAN = RowPlans({"num_tokens": Count(24, 1024)}, rmsnorm.PLAN.choices, rmsnorm.PLAN.special)


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
        normal = normalize(heads, inputs[f"{name}_weight"], eps)
        outputs[f"{name}_out"] = Expected(normal.value.view(inputs[name].shape), normal.parts)
    return outputs


def run_sglang(eps: float, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

    fused_inplace_qknorm(inputs["q"], inputs["k"], inputs["q_weight"], inputs["k_weight"], eps)
    return {"q_out": inputs["q"], "k_out": inputs["k"]}


def family(suffix: str, eps: float) -> Family:
    """The record of one epsilon."""
    return Family(
        name=f"fused_qknorm{suffix}",
        op_type="rmsnorm",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=functools.partial(oracle, eps),
        compare={"q_out": NORMALIZED, "k_out": NORMALIZED},
        strided=("q", "k"),
        isolated=("q", "k"),
        kernels=(
            Kernel(
                f"{MODULE}.fused_inplace_qknorm",
                functools.partial(run_sglang, eps),
                limits={"num_tokens": (1, 1 << 20)},
                in_place=("q", "k"),
            ),
        ),
    )


FAMILIES = tuple(family(suffix, eps) for suffix, eps in EPSILONS.items())
