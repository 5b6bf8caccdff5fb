"""RMSNorm of the Gemma models, whose learned weight is the difference of the scale from 1.

Inputs, oracle and kernels are those of `rmsnorm`, with 1 + weight for its weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flashinfer_trace.families import rmsnorm
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.verdict.compare import ErrorBound, Expected, Policy, unit_roundoff

EPS = 1e-6


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Those of `rmsnorm`, with weights around 0; bfloat16 holds more of their bits than of 1 + weight.

    Half of the `huge` ones are beyond float16's range.
    """
    inputs = rmsnorm.make_inputs(definition, plan, draws)
    scale = 1.0 if plan["values"] == "huge" else 0.25
    weight = draws.normal([definition.const_axes["hidden_size"]], scale=scale)
    inputs["weight"] = (weight * rmsnorm.CORNER_WEIGHTS.get(plan["values"], 1.0)).to(torch.bfloat16)
    return inputs


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    return rmsnorm.oracle(EPS, definition, {**inputs, "weight": inputs["weight"].double() + 1})


def normalized_bound(expected: Expected) -> torch.Tensor:
    """The bound of `rmsnorm`, and one float32 rounding more, of 1 + weight."""
    return rmsnorm.normalized_bound(expected) + expected.value.abs() * unit_roundoff(torch.float32)


NORMALIZED = ErrorBound(
    normalized_bound,
    "one bf16 rounding, u = 2^-8, of a float32 value: half the error of its sum of squares, 9 roundings",
)


def run_gemma3(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's norm of Gemma 3: PyTorch step by step."""
    from sglang.srt.layers.layernorm import Gemma3RMSNorm

    norm = Gemma3RMSNorm(definition.const_axes["hidden_size"], EPS)
    norm.weight = torch.nn.Parameter(inputs["weight"], requires_grad=False)
    return {"output": norm.forward_native(inputs["hidden_states"])}


def gemma_family(name: str, compare: Mapping[str, Policy], more: tuple[Kernel, ...] = ()) -> Family:
    return replace(rmsnorm.norm_family(name, name, EPS, compare, more), make_inputs=make_inputs, oracle=oracle)


FAMILIES = (
    gemma_family(
        "gemma_rmsnorm",
        {"output": NORMALIZED},
        (Kernel(f"{rmsnorm.SGLANG}.Gemma3RMSNorm", run_gemma3, variant="forward_native", limits=rmsnorm.LAUNCHABLE),),
    ),
    gemma_family("gemma_fused_add_rmsnorm", {"output": NORMALIZED, "residual_out": rmsnorm.RESIDUAL}),
)
