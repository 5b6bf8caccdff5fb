"""RMSNorm of the Gemma models, whose learned weight is the difference of the scale from 1.

Inputs, oracle and kernels are those of `rmsnorm`, with 1 + weight for its weight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families import rmsnorm
from flashinfer_trace.harness.compare import ErrorBound, Expected, Policy, unit_roundoff
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import Draws

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


def normalised_bound(expected: Expected) -> torch.Tensor:
    """The bound of `rmsnorm`, and one float32 rounding more, of 1 + weight."""
    return rmsnorm.normalised_bound(expected) + expected.value.abs() * unit_roundoff(torch.float32)


NORMALISED = ErrorBound(
    normalised_bound,
    "one bf16 rounding, u = 2^-8, of a float32 value: half the error of its sum of squares, 9 roundings",
)


def run_flashinfer(name: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    import flashinfer.norm

    function: Any = getattr(flashinfer.norm, name)
    if "residual" in inputs:
        function(inputs["hidden_states"], inputs["residual"], inputs["weight"], EPS)
        return rmsnorm.fused_outputs(definition, inputs)
    function(inputs["hidden_states"], inputs["weight"], EPS, out=outputs["output"])
    return outputs


def run_sgl(name: str, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    # As in `rmsnorm`, the op is sgl-kernel's own kernel; its Python function would call flashinfer.
    import sgl_kernel  # noqa: F401

    op = getattr(torch.ops.sgl_kernel, name).default
    if "residual" in inputs:
        op(inputs["hidden_states"], inputs["residual"], inputs["weight"], EPS, False)
        return rmsnorm.fused_outputs(definition, inputs)
    op(outputs["output"], inputs["hidden_states"], inputs["weight"], EPS, False)
    return outputs


def run_gemma3(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's norm of Gemma 3: PyTorch step by step."""
    from sglang.srt.layers.layernorm import Gemma3RMSNorm

    norm = Gemma3RMSNorm(definition.const_axes["hidden_size"], EPS)
    norm.weight = torch.nn.Parameter(inputs["weight"], requires_grad=False)
    return {"output": norm.forward_native(inputs["hidden_states"])}


def gemma_family(name: str, compare: Mapping[str, Policy], in_place: tuple[str, ...] = ()) -> Family:
    kernel = functools.partial(Kernel, limits=rmsnorm.LAUNCHABLE, in_place=in_place)
    plain = rmsnorm.norm_family(name, EPS, compare, {})
    eager = rmsnorm.sglang_norm("Gemma3RMSNorm", run_gemma3, "forward_native")
    return replace(
        plain,
        make_inputs=make_inputs,
        oracle=oracle,
        kernels=(
            kernel(f"flashinfer.norm.{name}", "flashinfer-python", functools.partial(run_flashinfer, name)),
            kernel(f"torch.ops.sgl_kernel.{name}", "sglang-kernel", functools.partial(run_sgl, name)),
            *(() if in_place else (eager,)),
        ),
    )


FAMILIES = (
    gemma_family("gemma_rmsnorm", {"output": NORMALISED}),
    gemma_family(
        "gemma_fused_add_rmsnorm",
        {"output": NORMALISED, "residual_out": rmsnorm.RESIDUAL},
        in_place=("hidden_states", "residual"),
    ),
)
