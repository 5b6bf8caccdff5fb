"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff
from flashinfer_trace.harness.family import Family, Kernel, Plan, PlanRequest
from flashinfer_trace.harness.inputs import VALUE_KINDS, Draws, sizes

EPS = 1e-6
ROUNDINGS = 8  # a root and its square, the mean's division, + EPS, rsqrt (2 ulp), two products


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    return st.fixed_dictionaries(
        {
            "batch_size": sizes(*request.range("batch_size", 0, 40, 4096)),
            "values": st.sampled_from(VALUE_KINDS),
            "zero_row": st.booleans(),
        }
    )


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    return {"batch_size": axes.get("batch_size", 8), "values": "normal", "zero_row": False}


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> dict[str, Any]:
    """Activations of the planned kind; weights around 1, as trained norms have; optionally one row of zeros."""
    hidden_size = definition.const_axes["hidden_size"]
    shape = (plan["batch_size"], hidden_size)
    inputs = {}
    for name in definition.inputs:
        if name == "weight":
            inputs[name] = (draws.normal([hidden_size], scale=0.25) + 1).to(torch.bfloat16)
        else:
            inputs[name] = draws.values(shape, torch.bfloat16, plan["values"])
            if plan["zero_row"] and plan["batch_size"]:
                inputs[name][plan["batch_size"] // 2] = 0
    return inputs


def normalise(x: torch.Tensor, weight: torch.Tensor) -> Expected:
    """The norm in float64, from the mean of the products x_i x_i (a dot product) instead of the row's 2-norm."""
    n = x.shape[-1]
    mean_square = torch.einsum("bi,bi->b", x, x).div(n).unsqueeze(-1)
    value = (weight.double() * x) / torch.sqrt(mean_square + EPS)
    return Expected(value, {"length": torch.tensor(float(n), device=x.device)})


def oracle(definition: Definition, inputs: dict[str, Any]) -> dict[str, Expected]:
    if "residual" not in inputs:
        return {"output": normalise(inputs["hidden_states"].double(), inputs["weight"])}
    total = inputs["hidden_states"].double() + inputs["residual"].double()
    return {"output": normalise(total, inputs["weight"]), "residual_out": Expected(total, exact=True)}


def normalised_bound(expected: Expected) -> torch.Tensor:
    """One bf16 rounding of a value that float32 carried with a few roundings and a sum of squares."""
    magnitude = expected.value.abs()
    inside = summation_error(magnitude, expected.parts["length"]) / 2 + magnitude * ROUNDINGS * unit_roundoff(
        torch.float32
    )
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


NORMALISED = ErrorBound(
    normalised_bound,
    "one bf16 rounding, u = 2^-8, of a float32 value: half the error of its sum of squares, 8 roundings",
)
RESIDUAL = ErrorBound(normalised_bound, "the sum of two bf16 numbers is exact in float64: correctly rounded to bf16")


def run_flashinfer_rmsnorm(definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    import flashinfer.norm

    flashinfer.norm.rmsnorm(inputs["hidden_states"], inputs["weight"], EPS, out=outputs["output"])
    return outputs  # type: ignore[no-any-return]


def run_sgl_rmsnorm(definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    # sgl_kernel.rmsnorm hands bf16 to flashinfer when that is importable; the op is sgl-kernel's own kernel.
    import sgl_kernel  # noqa: F401

    torch.ops.sgl_kernel.rmsnorm.default(outputs["output"], inputs["hidden_states"], inputs["weight"], EPS, False)
    return outputs  # type: ignore[no-any-return]


def run_flashinfer_fused(definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    import flashinfer.norm

    flashinfer.norm.fused_add_rmsnorm(inputs["hidden_states"], inputs["residual"], inputs["weight"], EPS)
    return {"output": inputs["hidden_states"], "residual_out": inputs["residual"]}


def run_sgl_fused(definition: Definition, inputs: Any, outputs: Any) -> dict[str, torch.Tensor]:
    import sgl_kernel  # noqa: F401

    torch.ops.sgl_kernel.fused_add_rmsnorm.default(
        inputs["hidden_states"], inputs["residual"], inputs["weight"], EPS, False
    )
    return {"output": inputs["hidden_states"], "residual_out": inputs["residual"]}


# No kernel launches for zero rows: an empty grid is an error in CUDA.
LAUNCHABLE = {"batch_size": (1, 1 << 20)}
IN_PLACE = ("hidden_states", "residual")

FAMILIES = (
    Family(
        name="rmsnorm",
        op_type="rmsnorm",
        twin={"hidden_size": 64},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": NORMALISED},
        kernels=(
            Kernel("flashinfer.norm.rmsnorm", "flashinfer-python", run_flashinfer_rmsnorm, limits=LAUNCHABLE),
            Kernel("torch.ops.sgl_kernel.rmsnorm", "sglang-kernel", run_sgl_rmsnorm, limits=LAUNCHABLE),
        ),
    ),
    Family(
        name="fused_add_rmsnorm",
        op_type="rmsnorm",
        twin={"hidden_size": 64},
        plans=plans,
        plan_for_axes=plan_for_axes,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": NORMALISED, "residual_out": RESIDUAL},
        kernels=(
            Kernel(
                "flashinfer.norm.fused_add_rmsnorm",
                "flashinfer-python",
                run_flashinfer_fused,
                limits=LAUNCHABLE,
                in_place=IN_PLACE,
            ),
            Kernel(
                "torch.ops.sgl_kernel.fused_add_rmsnorm",
                "sglang-kernel",
                run_sgl_fused,
                limits=LAUNCHABLE,
                in_place=IN_PLACE,
            ),
        ),
    ),
)
