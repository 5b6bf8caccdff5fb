"""RMSNorm, alone and fused with the residual addition before it, each with an epsilon of 1e-6 and of 1e-5.

The fused kernels write the sum over `residual`. It is the second output of fused_add_rmsnorm_residual_out; the families
fused_add_rmsnorm, which follow flashinfer-bench's dataset, leave it out.

Gemma's learned weight is the difference of the scale from 1. `fused_qknorm` normalizes each head of queries and
keys, in place.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import FLAG, Count, RowPlans
from flashinfer_trace.verdict.compare import (
    ErrorBound,
    Expected,
    Policy,
    rounding_error,
    summation_error,
    unit_roundoff,
)

SGLANG = "sglang.srt.layers.layernorm"
ROUNDINGS = 8  # a root and its square, the mean's division, + eps, rsqrt (2 ulp), two products

#: Weights at the ends of float16's range, with activations of the same size; usual ones with vast activations.
CORNER_WEIGHTS = {"huge": 1e5, "minute": 1e-6, "vast": 1.0}
#: Beyond it a kernel's sum of squares is infinite, and the reciprocal root of that is 0. No row of a plan comes near.
LARGEST_SUM = torch.finfo(torch.float32).max

#: The inputs whose rows are independent of each other. Kernels take them as slices of wider tensors.
ROWS = ("hidden_states", "residual")

PLAN = RowPlans(
    {"batch_size": Count(40, 4096)},
    {"values": VALUE_KINDS, "zero_row": FLAG},
    special=[{"values": values} for values in CORNER_WEIGHTS],
)


def weights(size: int, kind: str, draws: Draws, factors: Mapping[str, float] = CORNER_WEIGHTS) -> torch.Tensor:
    """float32 weights around 1, in corners many times as large; with `vast` activations every other one is negative. A
    sign changes no rounding of a norm, so kernels have this corner too."""
    weight = (draws.normal([size], scale=0.25) + 1) * factors.get(kind, 1.0)
    if kind == "vast":
        weight[1::2] *= -1
    return weight


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    hidden_size = definition.const_axes["hidden_size"]
    shape = (plan["batch_size"], hidden_size)
    inputs = {}
    for name in definition.inputs:
        if name == "weight":
            inputs[name] = weights(hidden_size, plan["values"], draws).to(torch.bfloat16)
        else:
            inputs[name] = draws.values(shape, torch.bfloat16, plan["values"])
            if plan["zero_row"] and plan["batch_size"]:
                inputs[name][plan["batch_size"] // 2] = 0
    return inputs


def normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Expected:
    """The norm in float64, from the mean of the squares of x_i (a dot product) instead of the row's 2-norm."""
    n = x.shape[-1]
    squares = torch.einsum("bi,bi->b", x, x).unsqueeze(-1)
    mean_square = squares.div(n).masked_fill(squares > LARGEST_SUM, math.inf)
    value = (weight.double() * x) / torch.sqrt(mean_square + eps)
    return Expected(value, {"length": torch.tensor(float(n), device=x.device)})


def oracle(eps: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    if "residual" not in inputs:
        return {"output": normalize(inputs["hidden_states"].double(), inputs["weight"], eps)}
    total = inputs["hidden_states"].double() + inputs["residual"].double()
    # A sum in the middle of two bf16 numbers has one right answer, the even one.
    expected = {
        "output": normalize(total, inputs["weight"], eps),
        "residual_out": Expected(total.to(torch.bfloat16).double(), exact=True),
    }
    return {name: expected[name] for name in definition.outputs}


def normalized_bound(expected: Expected) -> torch.Tensor:
    """One bf16 rounding of a value that float32 carried with a few roundings and a sum of squares."""
    magnitude = expected.value.abs()
    inside = summation_error(magnitude, expected.parts["length"]) / 2 + magnitude * ROUNDINGS * unit_roundoff(
        torch.float32
    )
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


NORMALIZED = ErrorBound(
    normalized_bound,
    "one bf16 rounding, u = 2^-8, of a float32 value: half the error of its sum of squares, 8 roundings",
)
RESIDUAL = ErrorBound(normalized_bound, "the sum of two bf16 numbers is exact in float64: correctly rounded to bf16")


def fused_outputs(definition: Definition, inputs: Inputs) -> Outputs:
    """The declared outputs among those that the fused kernels wrote over their inputs."""
    written = {"output": inputs["hidden_states"], "residual_out": inputs["residual"]}
    return {name: written[name] for name in definition.outputs}


def run_flashinfer(name: str, eps: float, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import flashinfer.norm

    function: Any = getattr(flashinfer.norm, name)
    if "residual" in inputs:
        function(inputs["hidden_states"], inputs["residual"], inputs["weight"], eps)
        return fused_outputs(definition, inputs)
    function(inputs["hidden_states"], inputs["weight"], eps, out=outputs["output"])
    return outputs


def run_sgl(name: str, eps: float, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    # sgl_kernel's function of that name hands bf16 to flashinfer when that is importable; the op is its own kernel.
    import sgl_kernel  # noqa: F401

    op = getattr(torch.ops.sgl_kernel, name).default
    inputs = {name: value.contiguous() for name, value in inputs.items()}
    if "residual" in inputs:
        op(inputs["hidden_states"], inputs["residual"], inputs["weight"], eps, False)
        return fused_outputs(definition, inputs)
    op(outputs["output"], inputs["hidden_states"], inputs["weight"], eps, False)
    return outputs


def run_batch_invariant(eps: float, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's norm in deterministic mode: PyTorch step by step, with a Triton kernel for the mean."""
    from sglang.srt.batch_invariant_ops import disable_batch_invariant_mode, enable_batch_invariant_mode
    from sglang.srt.layers.layernorm import RMSNorm

    norm = RMSNorm(definition.const_axes["hidden_size"], eps)
    norm.weight = torch.nn.Parameter(inputs["weight"], requires_grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells of every operator that the mode replaces.
        enable_batch_invariant_mode(enable_bmm=False)
        try:
            output, residual = norm.forward_native(inputs["hidden_states"], inputs["residual"])
        finally:
            disable_batch_invariant_mode()
    written = {"output": output, "residual_out": residual}
    return {name: written[name] for name in definition.outputs}


# No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"batch_size": (1, 1 << 20)}


def norm_family(
    name: str, function: str, eps: float, compare: Mapping[str, Policy], more: tuple[Kernel, ...] = ()
) -> Family:
    in_place = ("hidden_states", "residual") if "fused" in function else ()
    kernel = functools.partial(Kernel, limits=LAUNCHABLE, in_place=in_place)
    flashinfer, sgl = (functools.partial(run, function, eps) for run in (run_flashinfer, run_sgl))
    return Family(
        name=name,
        op_type="rmsnorm",
        twin={"hidden_size": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=functools.partial(oracle, eps),
        compare=compare,
        kernels=(
            kernel(f"flashinfer.norm.{function}", flashinfer),
            kernel(f"torch.ops.sgl_kernel.{function}", sgl),
            *more,
        ),
        strided=ROWS,
        isolated=ROWS,
    )


def batch_invariant(eps: float) -> Kernel:
    call = functools.partial(run_batch_invariant, eps)
    return Kernel(f"{SGLANG}.RMSNorm", call, variant="forward_native in batch-invariant mode", limits=LAUNCHABLE)


EPSILONS = {"": 1e-6, "_eps1e5": 1e-5}

#: The family of the epsilon 1e-6 -> the function of flashinfer and sgl-kernel, and the policies.
NORMS: dict[str, tuple[str, dict[str, Policy]]] = {
    "rmsnorm": ("rmsnorm", {"output": NORMALIZED}),
    "fused_add_rmsnorm": ("fused_add_rmsnorm", {"output": NORMALIZED}),
    "fused_add_rmsnorm_residual_out": ("fused_add_rmsnorm", {"output": NORMALIZED, "residual_out": RESIDUAL}),
}
PLAIN = tuple(
    norm_family(f"{name}{suffix}", function, eps, compare, (batch_invariant(eps),) if "residual_out" in compare else ())
    for name, (function, compare) in NORMS.items()
    for suffix, eps in EPSILONS.items()
)


MODULE = "sglang.kernels.ops.layernorm.norm"

#: The corners have heads and weights at the ends of float16's range, and heads whose squares are beyond float32's.
HEADS_PLAN = RowPlans({"num_tokens": Count(24, 1024)}, PLAN.choices, PLAN.special)


def head_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, tokens = definition.const_axes, plan["num_tokens"]
    inputs = {}
    for name, heads in (("q", axes["num_qo_heads"]), ("k", axes["num_kv_heads"])):
        inputs[name] = draws.values([tokens, heads, axes["head_dim"]], torch.bfloat16, plan["values"])
        if plan["zero_row"] and tokens:
            inputs[name][tokens // 2] = 0
    for name in ("q_weight", "k_weight"):
        inputs[name] = weights(axes["head_dim"], plan["values"], draws).to(torch.bfloat16)
    return inputs


def heads_oracle(eps: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    outputs = {}
    for name in ("q", "k"):
        heads = inputs[name].double().flatten(0, 1)
        normal = normalize(heads, inputs[f"{name}_weight"], eps)
        outputs[f"{name}_out"] = Expected(normal.value.view(inputs[name].shape), normal.parts)
    return outputs


def qknorm_family(suffix: str, eps: float) -> Family:
    return Family(
        name=f"fused_qknorm{suffix}",
        op_type="rmsnorm",
        twin={"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64},
        plan=HEADS_PLAN,
        make_inputs=head_inputs,
        oracle=functools.partial(heads_oracle, eps),
        compare={"q_out": NORMALIZED, "k_out": NORMALIZED},
        strided=("q", "k"),
        isolated=("q", "k"),
        kernels=(
            calling(
                f"{MODULE}.fused_inplace_qknorm",
                f"q k q_weight k_weight {eps}",
                limits={"num_tokens": (1, 1 << 20)},
                in_place=("q", "k"),
            ),
        ),
    )


QKNORM = tuple(qknorm_family(suffix, eps) for suffix, eps in EPSILONS.items())


GEMMA_EPS = 1e-6


def gemma_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Those of the plain norm, but with weights around 0, where bfloat16 holds more bits. Half of the `huge` ones are
    beyond float16's range."""
    inputs = make_inputs(definition, plan, draws)
    scale = 1.0 if plan["values"] == "huge" else 0.25
    weight = draws.normal([definition.const_axes["hidden_size"]], scale=scale)
    inputs["weight"] = (weight * CORNER_WEIGHTS.get(plan["values"], 1.0)).to(torch.bfloat16)
    return inputs


def gemma_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return oracle(GEMMA_EPS, definition, {**inputs, "weight": inputs["weight"].double() + 1})


def gemma_bound(expected: Expected) -> torch.Tensor:
    return normalized_bound(expected) + expected.value.abs() * unit_roundoff(torch.float32)


GEMMA_NORMALIZED = ErrorBound(
    gemma_bound, "one bf16 rounding, u = 2^-8, of a float32 value: half the error of its sum of squares, 9 roundings"
)


def run_gemma3(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's norm of Gemma 3: PyTorch step by step."""
    from sglang.srt.layers.layernorm import Gemma3RMSNorm

    norm = Gemma3RMSNorm(definition.const_axes["hidden_size"], GEMMA_EPS)
    norm.weight = torch.nn.Parameter(inputs["weight"], requires_grad=False)
    return {"output": norm.forward_native(inputs["hidden_states"])}


def gemma_family(name: str, compare: Mapping[str, Policy], more: tuple[Kernel, ...] = ()) -> Family:
    return replace(norm_family(name, name, GEMMA_EPS, compare, more), make_inputs=gemma_inputs, oracle=gemma_oracle)


GEMMA = (
    gemma_family(
        "gemma_rmsnorm",
        {"output": GEMMA_NORMALIZED},
        (Kernel(f"{SGLANG}.Gemma3RMSNorm", run_gemma3, variant="forward_native", limits=LAUNCHABLE),),
    ),
    gemma_family("gemma_fused_add_rmsnorm", {"output": GEMMA_NORMALIZED, "residual_out": RESIDUAL}),
)
FAMILIES = (*PLAIN, *QKNORM, *GEMMA)
