"""Gemma-4's fused norms: of queries, keys and values; with residual and factor at the end of a layer; of two branches.

SGLang's Triton kernels (gemma4_fused_ops.py in 0.5.23) compute all of it in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flashinfer_trace.families import rmsnorm
from flashinfer_trace.families.rmsnorm import NORMALIZED, ROUNDINGS, normalize, weights
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, KernelCall, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

EPS = 1e-6
U = unit_roundoff(torch.float32)
MODULE = "sglang.kernels.ops.layernorm.gemma4_fused_ops"
#: Factors of a layer.
SCALARS = (0.5, 1.0, -3.0)
#: Beside a residual of zeros, the epsilons of norms of minute rows show.
PLAN = replace(
    rmsnorm.PLAN,
    choices={**rmsnorm.PLAN.choices, "scalar": SCALARS, "no_residual": FLAG},
    special=[*rmsnorm.PLAN.special, {"values": "minute", "no_residual": True}],  # type: ignore[misc]
)


def qkv_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    inputs = rmsnorm.head_inputs(definition, plan, draws)
    inputs["v"] = draws.values(list(inputs["k"].shape), torch.bfloat16, plan["values"])
    return {name: inputs[name] for name in definition.inputs}


def qkv_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    ones = torch.ones(definition.const_axes["head_dim"], device=inputs["v"].device)
    outputs = {}
    for name in ("q", "k", "v"):
        heads = inputs[name].double().flatten(0, 1)
        normal = normalize(heads, inputs.get(f"{name}_weight", ones), EPS)
        outputs[f"{name}_out"] = Expected(normal.value.view(inputs[name].shape), normal.parts)
    return outputs


def run_qkv(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.layernorm.gemma4_fused_ops import gemma_qkv_rmsnorm

    heads = [inputs[name].flatten(1) for name in ("q", "k", "v")]
    sizes = [definition.const_axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim")]
    gemma_qkv_rmsnorm(*heads, inputs["q_weight"], inputs["k_weight"], *sizes, EPS)
    return {f"{name}_out": inputs[name] for name in ("q", "k", "v")}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    inputs = {}
    for name, spec in definition.inputs.items():
        if name == "scalar":
            inputs[name] = plan["scalar"]
        elif spec.shape == ("hidden_size",):
            inputs[name] = weights(definition.const_axes["hidden_size"], plan["values"], draws).to(torch.bfloat16)
        else:
            shape = [plan["batch_size"], definition.const_axes["hidden_size"]]
            inputs[name] = draws.values(shape, torch.bfloat16, plan["values"])
            if name == "residual" and plan["no_residual"]:
                inputs[name].zero_()
            if plan["zero_row"] and plan["batch_size"]:
                inputs[name][plan["batch_size"] // 2] = 0
    return inputs


def relative(size: int) -> float:
    return float(summation_error(torch.ones((), dtype=torch.float64), size)) / 2 + ROUNDINGS * U


def ended(normed: torch.Tensor, error: torch.Tensor, inputs: Inputs) -> dict[str, Expected]:
    """The residual and the factor. ``error``: that of float32, given the one of the norm."""
    residual, scalar = inputs["residual"].double(), inputs["scalar"]
    inside = (error + 2 * U * (normed.abs() + residual.abs())) * abs(scalar)
    return {"output": Expected((normed + residual) * scalar, {"error": inside})}


def residual_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    normed = normalize(inputs["hidden_states"].double(), inputs["weight"], EPS).value
    return ended(normed, normed.abs() * relative(normed.shape[1]), inputs)


def dual_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Errors of the sum of both norms pass into its own norm: in each element, and through the mean of the squares."""
    first, second = (normalize(inputs[f"x{n}"].double(), inputs[f"weight{n}"], EPS).value for n in (1, 2))
    both, size = first + second, first.shape[1]
    normed = normalize(both, inputs["weight3"], EPS).value
    error = (first.abs() + second.abs()) * relative(size) + both.abs() * U
    mean_square = both.square().mean(dim=1, keepdim=True) + EPS
    of_root = (both.abs() * error).mean(dim=1, keepdim=True) / mean_square
    passed = error * inputs["weight3"].double().abs() / mean_square.sqrt()
    return ended(normed, passed + normed.abs() * (of_root + relative(size)), inputs)


POLICY = ErrorBound(
    lambda expected: rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + expected.parts["error"],
    "one bf16 rounding, u = 2^-8, of float32: half the error of each sum of squares and 8 roundings of each norm, the "
    "errors of a sum carried through its norm, 2 roundings of norm and residual",
)


def operands(inputs: Inputs) -> list[torch.Tensor]:
    """The inputs in order; kernels read the factor from memory."""
    scalar = torch.tensor([inputs["scalar"]], dtype=torch.float32, device=inputs["residual"].device)
    return [scalar if name == "scalar" else value for name, value in inputs.items()]


def run_residual(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.layernorm.gemma4_fused_ops import gemma_rmsnorm_residual_scalar

    return {"output": gemma_rmsnorm_residual_scalar(*operands(inputs), EPS)}


def run_dual(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.layernorm.gemma4_fused_ops import gemma_dual_rmsnorm_residual_scalar

    return {"output": gemma_dual_rmsnorm_residual_scalar(*operands(inputs), EPS, EPS, EPS)}


def ending(
    name: str, rows: tuple[str, ...], oracle: Callable[[Definition, Inputs], dict[str, Expected]], call: KernelCall
) -> Family:
    return Family(
        name=name,
        op_type="rmsnorm",
        twin={"hidden_size": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": POLICY},
        strided=rows,
        isolated=rows,
        kernels=(Kernel(f"{MODULE}.gemma_{name}", call, limits=rmsnorm.LAUNCHABLE),),
    )


HEADS = ("q", "k", "v")
FAMILIES = (
    Family(
        name="qkv_rmsnorm",
        op_type="rmsnorm",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        plan=rmsnorm.HEADS_PLAN,
        make_inputs=qkv_inputs,
        oracle=qkv_oracle,
        compare={"q_out": NORMALIZED, "k_out": NORMALIZED, "v_out": NORMALIZED},
        strided=HEADS,
        isolated=HEADS,
        kernels=(Kernel(f"{MODULE}.gemma_qkv_rmsnorm", run_qkv, limits={"num_tokens": (1, 1 << 20)}, in_place=HEADS),),
    ),
    ending("rmsnorm_residual_scalar", ("hidden_states", "residual"), residual_oracle, run_residual),
    ending("dual_rmsnorm_residual_scalar", ("x1", "x2", "residual"), dual_oracle, run_dual),
)
