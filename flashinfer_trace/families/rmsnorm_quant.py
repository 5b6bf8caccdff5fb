"""RMSNorm whose output is quantized to e4m3 with one scale, alone and after the residual addition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashinfer_trace.families import rmsnorm
from flashinfer_trace.families.quantization import nearest_e4m3
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import Expected, Policy, summation_error, unit_roundoff
from flashinfer_trace.verdict.intervals import Interval

EPS = 1e-6
U = unit_roundoff(torch.float32)
#: Those of the norm, and of a quotient by the scale or a product with its approximate reciprocal.
ROUNDINGS = rmsnorm.ROUNDINGS + 4
#: Scales: of usual codes, of codes up to 3, and of clamped ones.
SCALES = (0.02, 1.0, 3e-4)
PLAN = replace(
    rmsnorm.PLAN,
    choices={**rmsnorm.PLAN.choices, "scale": SCALES},
    special=[*rmsnorm.PLAN.special, *({"scale": scale} for scale in SCALES)],  # type: ignore[misc]
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    inputs = {name: spec for name, spec in definition.inputs.items() if name != "scale"}
    made = rmsnorm.make_inputs(replace(definition, inputs=inputs), plan, draws)
    return {**made, "scale": plan["scale"]}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The norm over the scale. ``relative``: its error in float32."""
    tensors = {name: value for name, value in inputs.items() if name != "scale"}
    found = rmsnorm.oracle(EPS, definition, tensors)
    normed = found["output"].value
    error = summation_error(torch.ones_like(normed[:1, :1]), normed.shape[1]) / 2 + ROUNDINGS * U
    return {**found, "output": Expected(normed / inputs["scale"], {"relative": error})}


def limits(expected: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    relative = expected.parts["relative"]
    both = nearest_e4m3(expected.value * (1 - relative)), nearest_e4m3(expected.value * (1 + relative))
    return torch.minimum(*both), torch.maximum(*both)


CODES = Interval(
    limits,
    "the nearest e4m3 code; its neighbor too where half the error of a sum of squares and 12 roundings move the "
    "quotient past a tie",
    codes=True,
)


def run(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import flashinfer.norm

    scale = torch.tensor([inputs["scale"]], dtype=torch.float32, device=inputs["weight"].device)
    if "residual" not in inputs:
        flashinfer.norm.rmsnorm_quant(outputs["output"], inputs["hidden_states"], inputs["weight"], scale, EPS)
        return outputs
    tensors = (inputs["hidden_states"], inputs["residual"], inputs["weight"], scale)
    flashinfer.norm.fused_add_rmsnorm_quant(outputs["output"], *tensors, EPS)
    return {"output": outputs["output"], "residual_out": inputs["residual"]}


def quantizing(name: str, compare: Mapping[str, Policy], in_place: tuple[str, ...] = ()) -> Family:
    return Family(
        name=name,
        op_type="rmsnorm",
        twin={"hidden_size": 64},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare=compare,
        isolated=rmsnorm.ROWS,
        kernels=(Kernel(f"flashinfer.norm.{name}", run, limits=rmsnorm.LAUNCHABLE, in_place=in_place),),
    )


FAMILIES = (
    quantizing("rmsnorm_quant", {"output": CODES}),
    quantizing("fused_add_rmsnorm_quant", {"output": CODES, "residual_out": rmsnorm.RESIDUAL}, ("residual",)),
)
