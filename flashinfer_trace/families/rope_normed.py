"""Gemma's RMSNorm of the heads of queries and keys, fused with their rotary embedding, and with the gates next to them.

SGLang's Triton kernel rounds normalized heads to bf16 before it rotates them; its CUDA kernel does not.
"""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families import rmsnorm, rope
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error
from flashinfer_trace.verdict.copies import SameBits

EPS = 1e-6
MODULE = "sglang.kernels.ops.attention"
#: Float32 roundings of one normalized feature, with 1 + weight, and of the products and the sum that rotate it.
ROUNDINGS = rmsnorm.ROUNDINGS + 4
#: ``special``: bits that arithmetic changes and a copy does not.
GATES = ("normal", "special")
PLAN = RowPlans(
    {"num_tokens": Count(24, 4096, corner=5), "max_seq_len": rope.PLAN.counts["max_seq_len"]},
    {
        **{name: rope.PLAN.choices[name] for name in ("cache", "positions", "theta", "bfloat16_cache")},
        **rmsnorm.PLAN.choices,
        "gate": GATES,
    },
    special=[*rmsnorm.PLAN.special, {"gate": "special"}, {"cache": "scaled"}],  # type: ignore[misc]
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, tokens = definition.const_axes, plan["num_tokens"]
    inputs = {}
    for name in ("q", "k"):
        heads = axes["num_qo_heads" if name == "q" else "num_kv_heads"]
        inputs[name] = draws.values([tokens, heads, axes["head_size"]], torch.bfloat16, plan["values"])
        if plan["zero_row"] and tokens:
            inputs[name][tokens // 2] = 0
        weight = draws.normal([axes["head_size"]], scale=0.25) * rmsnorm.CORNER_WEIGHTS.get(plan["values"], 1.0)
        inputs[f"{name}_weight"] = weight.to(torch.bfloat16)
    gate = draws.values(list(inputs["q"].shape), torch.bfloat16, plan["gate"])
    inputs["q_gate"] = torch.cat((inputs["q"], gate), dim=-1)
    inputs["cos_sin_cache"] = rope.make_cache(plan, axes["rotary_dim"], draws)
    inputs["positions"] = rope.make_positions(plan["positions"], tokens, plan["max_seq_len"], draws)
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The norm from a dot product, and the rotation in complex128. ``turned``: |x cos| + |y sin|, 0 for what stays."""
    size = definition.const_axes["head_size"]
    q = inputs["q"] if "q" in inputs else inputs["q_gate"][..., :size]
    normed = {}
    for name, x in (("q", q), ("k", inputs["k"])):
        weight = inputs[f"{name}_weight"].double() + 1
        normed[name] = rmsnorm.normalize(x.double().flatten(0, 1), weight, EPS).value.view(x.shape)
    found = {}
    for name, one in rope.oracle(True, definition, {**inputs, **normed}).items():
        found[name] = Expected(one.value, {"turned": one.parts["magnitude"], "copied": one.parts["copied"]})
    if "gate_out" in definition.outputs:
        found["gate_out"] = Expected(inputs["q_gate"][..., size:].contiguous())
    return found


def bound(before: float, expected: Expected) -> torch.Tensor:
    """One bf16 rounding of what float32 rotates, where a pair may be rounded by `before` first."""
    value, turned = expected.value, expected.parts["turned"]
    size = turned + value.abs() * expected.parts["copied"]
    length = value.shape[-1]
    inside = summation_error(size, length) / 2 + size * ROUNDINGS * rope.U + turned * before
    return rounding_error(value, torch.bfloat16) * (1 + rope.U_BF16) + inside * (1 + rope.U_BF16)


REASON = "one bf16 rounding, u = 2^-8, of float32: half the error of a sum of squares, 12 roundings of |x c| + |y s|"
POLICY = ErrorBound(functools.partial(bound, 0.0), REASON)
ROUNDED = ErrorBound(functools.partial(bound, rope.U_BF16), f"{REASON}; normalized features are rounded to bf16 first")


def run_gate(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.fused_qk_rmsnorm_rope_gate import fused_qk_gemma_rmsnorm_rope_gate

    axes, gated = definition.const_axes, "q_gate" in inputs
    sizes = [axes[name] for name in ("num_qo_heads", "num_kv_heads", "head_size", "rotary_dim")]
    heads = inputs["q_gate" if gated else "q"].flatten(1), inputs["k"].flatten(1)
    rest = [inputs[name] for name in ("q_weight", "k_weight", "cos_sin_cache", "positions")]
    q, k, gate = fused_qk_gemma_rmsnorm_rope_gate(*heads, *rest, EPS, *sizes, has_gate=gated)
    found = {"q_out": q.view(len(q), sizes[0], sizes[2]), "k_out": k.view_as(inputs["k"])}
    return {**found, "gate_out": gate} if gated else found


def run_minimax(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """In place, in a tensor that also has the values: here keys stand for them, which must stay."""
    from sglang.kernels.ops.attention.minimax_qknorm_rope import minimax_qknorm_rope

    q, k = inputs["q"].flatten(1), inputs["k"].flatten(1)
    heads, kv_heads = definition.const_axes["num_qo_heads"], definition.const_axes["num_kv_heads"]
    qkv = torch.cat((q, k, k), dim=1)
    rest = [inputs[name] for name in ("q_weight", "k_weight", "cos_sin_cache", "positions")]
    minimax_qknorm_rope(qkv, *rest, heads, kv_heads, kv_heads, EPS)
    found = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    return {"q_out": found[:, :heads], "k_out": found[:, heads : heads + kv_heads]}


GATE = functools.partial(
    Kernel,
    f"{MODULE}.fused_qk_rmsnorm_rope_gate.fused_qk_gemma_rmsnorm_rope_gate",
    run_gate,
    limits=rope.LAUNCHABLE,
    compare={"q_out": ROUNDED, "k_out": ROUNDED},
)
TWIN = {"num_qo_heads": 4, "num_kv_heads": 2, "head_size": 32, "rotary_dim": 16}
FAMILIES = (
    Family(
        name="qk_gemma_rmsnorm_rope",
        op_type="rope",
        twin=TWIN,
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"q_out": POLICY, "k_out": POLICY},
        strided=("q", "k"),
        isolated=("q", "k"),
        kernels=(
            GATE(variant="without gate"),
            Kernel(f"{MODULE}.minimax_qknorm_rope.minimax_qknorm_rope", run_minimax, limits=rope.LAUNCHABLE),
        ),
    ),
    Family(
        name="qk_gemma_rmsnorm_rope_gate",
        op_type="rope",
        twin={**TWIN, "q_gate_size": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"q_out": POLICY, "k_out": POLICY, "gate_out": SameBits("gates are copied, bit for bit")},
        strided=("q_gate", "k"),
        kernels=(GATE(),),
    ),
)
