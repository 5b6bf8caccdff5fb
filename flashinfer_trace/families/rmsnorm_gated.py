"""RMSNorm with a gate: after the norm of heads, as linear attention has it, or before that of groups, as Mamba2 has it.

SGLang's Triton kernels (fla/fused_norm_gate.py and fla/layernorm_gated.py in 0.5.23) compute all of it in float32, with
ex2.approx. The first writes over the input.
"""

from __future__ import annotations

import functools

import torch

from flashinfer_trace.families.rmsnorm import ROUNDINGS
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, SPREAD, Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

U = unit_roundoff(torch.float32)
SMALLEST = torch.finfo(torch.float32).smallest_normal
VALUES = ("normal", "integers", "large", "tiny", "constant_rows", SPREAD)
#: ``saturated``: uniform in -120..120, where the sigmoid rounds to 0 or 1 and exp overflows.
GATES = ("normal", "saturated")


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    size = definition.const_axes.get("head_dim") or definition.const_axes["hidden_size"]
    rows = plan["num_rows"] if "num_rows" in plan else plan["num_tokens"]
    x = draws.values([rows, size], torch.bfloat16, plan["values"])
    if plan["zero_row"] and rows:
        x[rows // 2] = 0
    gate = (
        draws.uniform([rows, size], -120, 120) if plan["gate"] == "saturated" else draws.normal([rows, size], scale=2)
    )
    weight = draws.normal([size], scale=0.25) + 1
    return {"hidden_states": x, "gate": gate.to(torch.bfloat16), "weight": weight.to(torch.bfloat16)}


def sigmoid_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sigmoid in float64, through exp where that would cancel, and its relative error in float32: exp within
    2 + 1.2 |x| ulp, a sum, a quotient."""
    tail = x.clamp_max(0).exp()
    sigmoid = torch.where(x < -1, tail / (1 + tail), (1 + torch.tanh(x / 2)) / 2)
    return sigmoid, U * ((4 + 2.4 * x.abs()) * (1 - sigmoid) + 4)


def gated_after(silu: bool, eps: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The norm from a dot product, times weight and gate. Parts: ``relative``, the error of float32."""
    x, gate = inputs["hidden_states"].double(), inputs["gate"].double()
    sigmoid, relative = sigmoid_of(gate)
    size = x.shape[1]
    normed = x / (torch.einsum("bi,bi->b", x, x).unsqueeze(-1) / size + eps).sqrt()
    value = normed * inputs["weight"].double() * sigmoid * (gate if silu else 1)
    of_norm = summation_error(torch.ones((), dtype=torch.float64), size) / 2 + ROUNDINGS * U
    flushed = (normed.abs() + 1) * (gate.abs() + 1)
    return {"output": Expected(value, {"relative": relative + of_norm + 2 * U, "flushed": flushed})}


def gated_before(eps: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The same for groups of features. The errors of the gates pass into the mean, weighted by the squares."""
    gate, group = inputs["gate"].double(), definition.const_axes["group_size"]
    sigmoid, relative = sigmoid_of(gate)
    shape = [len(gate), gate.shape[1] // group, group]
    y = (inputs["hidden_states"].double() * gate * sigmoid).view(shape)
    relative = (relative + 2 * U).view(shape)
    squares = y.square()
    total = squares.sum(-1, keepdim=True)
    root = (total / group + eps).sqrt()
    of_mean = (squares * relative).sum(-1, keepdim=True) / (group * root.square())
    of_norm = summation_error(torch.ones((), dtype=torch.float64), group) / 2 + ROUNDINGS * U
    value = (y / root).flatten(1) * inputs["weight"].double()
    flushed = ((1 + gate.abs()) * (1 + inputs["hidden_states"].double().abs())).view_as(y) / root + 1
    parts = {"relative": (relative + of_mean + of_norm).flatten(1), "flushed": flushed.flatten(1) * 2}
    return {"output": Expected(value, parts)}


def bound(expected: Expected) -> torch.Tensor:
    value = expected.value
    inside = value.abs() * expected.parts["relative"] + SMALLEST * expected.parts["flushed"]
    return rounding_error(value, torch.bfloat16) * (1 + 2**-8) + inside


REASON = (
    "one bf16 rounding, u = 2^-8, of a float32 value: half the error of its sum of squares, 8 roundings; a sigmoid "
    "whose exponential is within 2 + 1.2 |x| ulp"
)
POLICY = ErrorBound(bound, REASON)


def run_fused(activation: str, eps: float, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.attention.fla.fused_norm_gate import rms_norm_gated

    given = (inputs["hidden_states"].contiguous(), inputs["gate"], inputs["weight"])  # x is dense, and written over
    output: torch.Tensor = rms_norm_gated(*given, None, activation, eps=eps)
    return {"output": output}


def run_layernorm(
    activation: str, before: bool, eps: float, definition: Definition, inputs: Inputs, outputs: Outputs
) -> Outputs:
    """The norm after the gate, or before it (`before`)."""
    from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_gated

    output = rms_norm_gated(
        x=inputs["hidden_states"],
        weight=inputs["weight"],
        bias=None,
        z=inputs["gate"],
        eps=eps,
        group_size=definition.const_axes.get("group_size"),
        norm_before_gate=before,
        is_rms_norm=True,
        activation=activation,
    )
    return {"output": output}


FUSED = "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated"
LAYERNORM = "sglang.kernels.ops.attention.fla.layernorm_gated.rms_norm_gated"
CHOICES = {"values": VALUES, "gate": GATES, "zero_row": FLAG}
ROWS = ("hidden_states", "gate")
CORNERS = ({"gate": "saturated"}, {"values": "huge"}, {"values": "minute"}, {"values": "tiny"})


def plan_of(axis: str) -> RowPlans:
    return RowPlans({axis: Count(40, 4096)}, CHOICES, special=[{axis: 1}, *CORNERS])


def of_heads(name: str, activation: str, eps: float) -> Family:
    limits = {"num_rows": (1, 1 << 20)}
    fused = functools.partial(run_fused, activation, eps)
    layernorm = functools.partial(run_layernorm, activation, True, eps)
    return Family(
        name=name,
        op_type="rmsnorm",
        twin={"head_dim": 64},
        plan=plan_of("num_rows"),
        make_inputs=make_inputs,
        oracle=functools.partial(gated_after, activation == "swish", eps),
        compare={"output": POLICY},
        kernels=(
            Kernel(FUSED, fused, limits=limits, in_place=("hidden_states",)),
            Kernel(LAYERNORM, layernorm, limits=limits),
        ),
        strided=ROWS,
        isolated=ROWS,
    )


FAMILIES = (
    of_heads("rmsnorm_silu_gate", "swish", 1e-6),
    of_heads("rmsnorm_sigmoid_gate", "sigmoid", 1e-5),
    Family(
        name="silu_gate_grouped_rmsnorm",
        op_type="rmsnorm",
        twin={"hidden_size": 96, "group_size": 32},
        plan=plan_of("num_tokens"),
        make_inputs=make_inputs,
        oracle=functools.partial(gated_before, 1e-5),
        compare={"output": POLICY},
        kernels=(
            Kernel(
                LAYERNORM, functools.partial(run_layernorm, "swish", False, 1e-5), limits={"num_tokens": (1, 1 << 20)}
            ),
        ),
        strided=ROWS,
        isolated=ROWS,
    ),
)
