"""Gated activations whose halves have a limit: clamped SwiGLU, gpt-oss' SwiGLU, and SiTU, which caps both by a tanh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from flashinfer_trace.families import activation
from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.rmsnorm_gated import SMALLEST, sigmoid_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, unit_roundoff

U = unit_roundoff(torch.float32)
#: tanh.approx.f32 has a relative error of 2^-11 (PTX ISA, "tanh"); SiTU has two.
TWO_FAST_TANH = 2.0**-10
#: Scalar -> its values, that of models first. Limits are bf16 numbers: one of SGLang's kernels clamps in bf16.
CLAMP = {"limit": (10.0, 7.0, 0.75)}
OAI = {"alpha": (1.702, 1.0), "beta": (1.0, 0.0, -0.5), "limit": (7.0, 0.75)}
SITU = {"beta": (4.0, 1.0), "linear_beta": (25.0, 0.5)}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    scalars = {name: plan[name] for name, spec in definition.inputs.items() if spec.shape is None}
    return {**activation.make_inputs(definition, plan, draws), **scalars}


def halves(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up in float64, clamped if there is a limit: where they are larger, it takes their place."""
    gate, up = inputs["gate_up"].double().tensor_split(2, dim=-1)
    if "limit" not in inputs:
        return gate, up
    limit = inputs["limit"]
    return torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, up.sign() * limit, up)


def product(factors: Sequence[torch.Tensor], relative: torch.Tensor) -> dict[str, Expected]:
    """Parts: ``relative``, the error of float32; ``flushed``, the loss where a factor is subnormal there."""
    value = functools.reduce(torch.mul, factors)
    flushed = SMALLEST * functools.reduce(torch.mul, (1 + factor.abs() for factor in factors))
    return {"output": Expected(value, {"relative": relative, "flushed": flushed})}


def swiglu_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The sigmoid through exp or tanh; the argument alpha g is rounded twice, with alpha."""
    gate, up = halves(inputs)
    argument = inputs.get("alpha", 1.0) * gate
    sigmoid, relative = sigmoid_of(argument)
    relative = relative + U * (2 * argument.abs() * (1 - sigmoid) + 4)
    return product((gate, sigmoid, up + inputs.get("beta", 0.0)), relative)


def tanh_of(x: torch.Tensor) -> torch.Tensor:
    """tanh(x) as (exp(2 x) - 1) / (exp(2 x) + 1)."""
    less_one = torch.expm1(2 * x.clamp(-20, 20))
    return less_one / (less_one + 2)


def situ_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    gate, up = halves(inputs)
    sigmoid, relative = sigmoid_of(gate)
    beta, linear_beta = inputs["beta"], inputs["linear_beta"]
    factors = (beta * tanh_of(gate / beta), sigmoid, linear_beta * tanh_of(up / linear_beta))
    return product(factors, relative + 24 * U)


def bound(more: float, expected: Expected) -> torch.Tensor:
    """One bf16 rounding of a float32 value, which may have a relative error of `more` besides."""
    value = expected.value
    inside = value.abs() * (expected.parts["relative"] + more) + expected.parts["flushed"]
    return rounding_error(value, torch.bfloat16) * (1 + 2**-8) + inside


POLICY = ErrorBound(
    functools.partial(bound, 0.0),
    "one bf16 rounding, u = 2^-8, of float32: exp within 2 + 1.2 |x| ulp, a sum, a quotient, products; a sigmoid below "
    "2^-126 may be 0",
)
FAST_TANH = ErrorBound(
    functools.partial(bound, TWO_FAST_TANH),
    "one bf16 rounding, u = 2^-8, of float32 with two tanh.approx, each within 2^-11, and __expf within 2 + 1.2 |x| "
    "ulp; a sigmoid below 2^-126 is 0",
)


def capped(
    name: str,
    scalars: Mapping[str, tuple[float, ...]],
    oracle: Callable[[Definition, Inputs], dict[str, Expected]],
    path: str,
    text: str,
    policy: ErrorBound = POLICY,
) -> Family:
    """The record of one activation; corners combine the second value of each scalar with large values."""
    corners = [{**corner, "values": "large"} for name in scalars for corner in ({name: scalars[name][1]},)]
    plan = replace(activation.PLAN, choices={**activation.PLAN.choices, **scalars})
    return Family(
        name=name,
        op_type="activation",
        twin={"intermediate_size": 48, "gate_up_size": 96},
        plan=replace(plan, special=[*activation.CORNERS, *corners]),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": POLICY},
        isolated=() if "limit" in scalars else ("gate_up",),  # a clamp may take the limit for NaN
        kernels=(
            calling(
                f"sglang.kernels.ops.activation.{path}",
                text,
                limits=activation.LAUNCHABLE,
                compare={} if policy is POLICY else {"output": policy},
            ),
        ),
    )


FAMILIES = (
    capped("silu_and_mul_clamp", CLAMP, swiglu_oracle, "silu_and_mul_clamp.silu_and_mul_clamp", "gate_up output limit"),
    capped(
        "swiglu_oai", OAI, swiglu_oracle, "minimax_m3_swiglu.swiglu_oai_split", "gate_up alpha beta limit out=output"
    ),
    capped(
        "situ_and_mul",
        SITU,
        situ_oracle,
        "kimi_k3_situ_and_mul.situ_and_mul",
        "gate_up output beta linear_beta",
        FAST_TANH,
    ),
)
