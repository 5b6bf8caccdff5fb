"""Gates after attention and shared experts, and the squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_trace.families import activation
from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.rmsnorm_gated import GATES, SMALLEST, sigmoid_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

U = unit_roundoff(torch.float32)
ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise"
#: Factors of hidden states and of a gate's weights: the size of its logits is their product.
LOGITS = {"normal": (1.0, 1.0), "saturated": (1.0, 60.0), "faint": (1.0, 1e-3), "beyond_float16": (1e5, 1e-5)}
EXTREME: tuple[Plan, ...] = ({"values": "huge"}, {"values": "minute"})


def plan_of(axis: str, **choices: tuple[str, ...]) -> RowPlans:
    """Rows of any kind; corners have a single row, the kinds of gates, and values beyond float16's range."""
    corners: list[Plan] = [{axis: 1}, *EXTREME]
    corners += [{name: kind} for name, kinds in choices.items() for kind in kinds]
    return RowPlans({axis: Count(40, 2048)}, {"values": VALUE_KINDS, **choices}, special=corners)


def sigmoid_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    shape = [plan["num_tokens"], axes["num_heads"], axes["head_dim"]]
    gate = draws.uniform(shape, -120, 120) if plan["gate"] == "saturated" else draws.normal(shape, scale=2)
    return {"attn_output": draws.values(shape, torch.bfloat16, plan["values"]), "gate": gate.to(torch.bfloat16)}


def sigmoid_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    x, gate = inputs["attn_output"].double(), inputs["gate"].double()
    sigmoid, relative = sigmoid_of(gate)
    error = (x * sigmoid).abs() * (relative + U) + SMALLEST * (1 + x.abs())
    return {"output": Expected(x * sigmoid, {"error": error})}


def add_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Hidden states and weights for logits of the planned size; both outputs of the planned kind."""
    rows, size = plan["num_tokens"], definition.const_axes["hidden_size"]
    of_hidden, of_weight = LOGITS[plan["logits"]]
    known = {name: draws.values([rows, size], torch.bfloat16, plan["values"]) for name in ("shared", "routed")}
    return {
        "hidden_states": draws.normal([rows, size], torch.bfloat16, of_hidden),
        "gate_weight": draws.normal([size], torch.bfloat16, of_weight * size**-0.5),
        **{f"{name}_output": value for name, value in known.items()},
    }


def add_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The gate from a dot product, whose error shows times the slope of the sigmoid, at most 1/4."""
    hidden, weight = inputs["hidden_states"].double(), inputs["gate_weight"].double()
    logit = torch.einsum("bi,i->b", hidden, weight).unsqueeze(1)
    off = summation_error(hidden.abs() @ weight.abs(), hidden.shape[1]).unsqueeze(1)
    gate, relative = sigmoid_of(logit)
    shared, routed = inputs["shared_output"].double(), inputs["routed_output"].double()
    value = routed + gate * shared
    of_gate = gate * (relative + U) + off * gate * (1 - gate) * (1 + off)
    error = shared.abs() * (of_gate + SMALLEST) + U * value.abs() + SMALLEST
    return {"output": Expected(value, {"error": error})}


def bound(expected: Expected) -> torch.Tensor:
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + expected.parts["error"]


def relu_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    shape = [plan["num_tokens"], definition.const_axes["intermediate_size"]]
    return {"input": draws.values(shape, torch.bfloat16, plan["values"])}


def relu_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    x = inputs["input"].double()
    return {"output": Expected(torch.where(x > 0, x * x, 0.0), {"error": torch.zeros_like(x)}, exact=True)}


def run_sigmoid(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.elementwise.elementwise import fused_sigmoid_mul

    found = fused_sigmoid_mul(inputs["attn_output"].flatten(1), inputs["gate"])
    return {"output": found.view_as(inputs["attn_output"])}


def run_add(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.elementwise.elementwise import fused_gate_sigmoid_mul_add

    fused_gate_sigmoid_mul_add(*inputs.values())
    return {"output": inputs["routed_output"]}


LIMITS: Mapping[str, tuple[int, int]] = activation.LAUNCHABLE
FAMILIES = (
    Family(
        name="sigmoid_mul",
        op_type="activation",
        twin={"num_heads": 4, "head_dim": 16},
        plan=plan_of("num_tokens", gate=GATES),
        make_inputs=sigmoid_inputs,
        oracle=sigmoid_oracle,
        compare={
            "output": ErrorBound(
                bound, "one bf16 rounding, u = 2^-8, of float32: a sigmoid with exp within 2 + 1.2 |x| ulp, a product"
            )
        },
        strided=("gate",),
        isolated=("attn_output", "gate"),
        kernels=(Kernel(f"{ELEMENTWISE}.fused_sigmoid_mul", run_sigmoid, limits=LIMITS),),
    ),
    Family(
        name="gate_sigmoid_mul_add",
        op_type="activation",
        twin={"hidden_size": 64},
        plan=plan_of("num_tokens", logits=tuple(LOGITS)),
        make_inputs=add_inputs,
        oracle=add_oracle,
        compare={
            "output": ErrorBound(
                bound,
                "one bf16 rounding, u = 2^-8, of float32: a sum of n products whose error passes through a sigmoid, "
                "exp within 2 + 1.2 |x| ulp, a product and a sum",
            )
        },
        isolated=("hidden_states", "shared_output", "routed_output"),
        kernels=(
            Kernel(f"{ELEMENTWISE}.fused_gate_sigmoid_mul_add", run_add, limits=LIMITS, in_place=("routed_output",)),
        ),
    ),
    Family(
        name="relu2",
        op_type="activation",
        twin={"intermediate_size": 48},
        plan=plan_of("num_tokens"),
        make_inputs=relu_inputs,
        oracle=relu_oracle,
        compare={"output": ErrorBound(bound, "the square of a bf16 number is exact in float32: correctly rounded")},
        isolated=("input",),
        kernels=(calling("sglang.kernels.ops.activation.activation.relu2", "input output", limits=LIMITS),),
    ),
)
