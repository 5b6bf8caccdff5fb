"""Mamba2's state space model, one token at a time.

The kernels work as follows, from the sources of SGLang 0.5.23 (mamba_ssm.py) and FlashInfer 0.7.2
(kernel_selective_state_update_stp.cuh):

- Both compute in float32, with softplus as log(1 + exp(x)), and round the state when they store it.
- Both skip the state of a sequence whose slot is -1 but compute its output, from a state of zeros. The output of
  padding is 0 here, as in flashinfer-bench, so they are given none.
- FlashInfer takes rates, steps and skips of heads only: A, dt, dt_bias and D are expanded, as models pass them, and so
  does one of the two paths of SGLang's kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families.gdn import softplus_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, SPREAD, Count, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, summation_error, unit_roundoff

U = unit_roundoff(torch.float32)
SMALLEST = torch.finfo(torch.float32).smallest_normal
#: Elements of x, B and C.
VALUES = ("normal", "large", "tiny", "integers", SPREAD)
#: Steps: ``usual``; ``short``, 1e-4 to 1e-3, so states keep nearly everything; ``long``, about 10, so they
#: keep nothing.
STEPS = ("usual", "short", "long")


@dataclass(frozen=True)
class StateOptions:
    """Choices that plans can draw for a kernel: padding, and rates, steps and skips that differ within a head."""

    padding: bool = True
    features: bool = True


def far_steps(plan: Plan) -> float:
    return {"usual": 0.0, "short": -8.0, "long": 10.0}[plan["steps"]]


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    sizes, rows = definition.const_axes, plan["batch_size"]
    heads, dim, states, groups = (sizes[axis] for axis in ("nheads", "head_dim", "dstate", "ngroups"))
    slots = max(rows, plan["state_cache_size"])
    within = dim if plan["features"] else 1

    def expanded(drawn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return drawn.to(dtype).expand(*drawn.shape[:-1], dim).contiguous()

    rates = draws.uniform([heads, within, states if plan["features"] else 1], -16.0, -0.02)
    indices = draws.permutation(slots)[:rows].to(torch.int32)
    if plan["padding"]:
        indices[1::3] = -1
    inputs: dict[str, Any] = {
        "state": draws.normal([slots, heads, dim, states], getattr(torch, definition.inputs["state"].dtype)),
        "x": draws.values([rows, heads, dim], torch.bfloat16, plan["values"]),
        "dt": expanded(draws.normal([rows, heads, within]) + far_steps(plan), torch.bfloat16),
        "A": rates.expand(heads, dim, states).contiguous(),
        "B": draws.values([rows, groups, states], torch.bfloat16, plan["values"]),
        "C": draws.normal([rows, groups, states], torch.bfloat16),
        "D": expanded(draws.normal([heads, within]), torch.bfloat16),
        "dt_bias": expanded(draws.normal([heads, within]), torch.bfloat16),
        "state_batch_indices": indices,
    }
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Sequence by sequence in float64: products of matrices read the state. Parts: ``error``, of float32."""
    before, x = inputs["state"].double(), inputs["x"].double()
    group = torch.arange(x.shape[1], device=x.device) // (x.shape[1] // inputs["B"].shape[1])
    rates, skip = inputs["A"].double(), inputs["D"].double()
    output, new = torch.zeros_like(x), before.clone()
    output_error, error = torch.zeros_like(output), torch.zeros_like(new)
    for row, slot in enumerate(inputs["state_batch_indices"].tolist()):
        if slot < 0:
            continue
        step, step_error = softplus_of(inputs["dt"][row].double() + inputs["dt_bias"].double())
        step, step_error = step.unsqueeze(-1), step_error.unsqueeze(-1)
        write, read = (inputs[name][row].double()[group] for name in "BC")
        kept = before[slot] * (rates * step).exp()
        taken = x[row].unsqueeze(-1) * write.unsqueeze(1)
        new[slot] = kept + step * taken
        # A decay below 2^-126 is flushed to 0, and takes the state along.
        of_kept = kept.abs() * (rates.abs() * (step_error + 3 * U * step) + 6 * U) + before[slot].abs() * SMALLEST
        error[slot] = of_kept + taken.abs() * (step_error + 4 * U * step) + 2 * U * new[slot].abs() + SMALLEST
        output[row] = (new[slot] @ read.unsqueeze(-1))[..., 0] + skip * x[row]
        terms = (new[slot].abs() @ read.abs().unsqueeze(-1))[..., 0] + (skip * x[row]).abs()
        output_error[row] = (error[slot] @ read.abs().unsqueeze(-1))[..., 0] + summation_error(terms, read.shape[1] + 1)
        output_error[row] += 2 * U * terms + SMALLEST
    return {"output": Expected(output, {"error": output_error}), "new_state": Expected(new, {"error": error})}


def bound(expected: Expected) -> torch.Tensor:
    """The slots that no sequence writes stay exactly as they are."""
    error = expected.parts["error"]
    return torch.where(error > 0, rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + error, 0.0)


ROUNDED = "one bf16 rounding, u = 2^-8, of "
STEP = (
    "float32: the step, 2^-24 (6 + 3 dt + (3 |x| + 4) sigmoid(x)), times |A| in the decay; the exponential and the "
    "products within 6 * 2^-24; a decay below 2^-126 is 0, |S| 2^-126"
)
OUTPUT = ErrorBound(bound, f"{ROUNDED}{STEP}; a sum over d_state features")


def tied(inputs: Inputs) -> dict[str, torch.Tensor]:
    """A, dt, dt_bias and D as models pass them: one number a head, expanded."""
    shape = inputs["A"].shape
    found = {"A": inputs["A"][:, 0, 0].contiguous()[:, None, None].expand(shape)}
    for name in ("dt", "dt_bias", "D"):
        found[name] = inputs[name][..., 0].contiguous().unsqueeze(-1).expand(inputs[name].shape)
    return found


def run_flashinfer(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from flashinfer.mamba import selective_state_update

    given = {name: inputs[name] for name in ("state", "x", "B", "C", "state_batch_indices")}
    output = selective_state_update(**given, **tied(inputs), dt_softplus=True, out=outputs["output"])
    return {"output": output, "new_state": inputs["state"]}


def run_sglang(of_heads: bool, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

    given = {**inputs, **(tied(inputs) if of_heads else {})}
    selective_state_update(**given, dt_softplus=True, out=outputs["output"])
    return {"output": outputs["output"], "new_state": inputs["state"]}


def most_rows(definition: Definition) -> int:
    sizes = definition.const_axes
    return max(8, 2**28 // (sizes["nheads"] * sizes["head_dim"] * sizes["dstate"] * 2))


def corners(request: PlanRequest) -> list[Plan]:
    options = request.options_of(StateOptions)
    return [
        {"batch_size": 1},
        *({"steps": steps} for steps in STEPS[1:]),
        {"values": "tiny", "steps": "short"},
        {"values": "large", "steps": "long"},
        {"values": "huge", "steps": "short"},
        {"batch_size": 2, "state_cache_size": 2, "features": options.features},
        *([{"padding": True, "batch_size": 5}] if options.padding else []),
    ]


LAUNCHABLE: Mapping[str, tuple[int, int]] = {"batch_size": (1, 1 << 16)}
SSU = "sglang.kernels.ops.mamba.triton_ops.mamba_ssm.selective_state_update"
OF_HEADS = StateOptions(padding=False, features=False)


def family(name: str, state: ErrorBound) -> Family:
    launched = functools.partial(Kernel, limits=LAUNCHABLE, in_place=("state",))
    return Family(
        name=name,
        op_type="mamba_ssu",
        twin={"nheads": 4, "head_dim": 8, "dstate": 16, "ngroups": 2},
        plan=RowPlans(
            {
                "batch_size": Count(6, most_rows),
                "state_cache_size": Count(
                    8, most_rows, least=1, corner=7, usual=lambda definition, axes: max(8, axes.get("batch_size", 8))
                ),
            },
            {
                "values": VALUES,
                "steps": STEPS,
                "features": lambda request: FLAG if request.options_of(StateOptions).features else (False,),
                "padding": lambda request: FLAG if request.options_of(StateOptions).padding else (False,),
            },
            special=corners,
            fit=lambda request, plan: {**plan, "state_cache_size": max(plan["state_cache_size"], plan["batch_size"])},
            many_rows=300,
        ),
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": OUTPUT, "new_state": state},
        kernels=(
            launched(SSU, functools.partial(run_sglang, False), plan_options=StateOptions(padding=False)),
            launched(SSU, functools.partial(run_sglang, True), variant="one rate a head", plan_options=OF_HEADS),
            launched("flashinfer.mamba.selective_state_update", run_flashinfer, plan_options=OF_HEADS),
        ),
        strided=("state", "x", "dt", "B", "C"),
    )


FAMILIES = (
    family("mamba_ssu_decode", ErrorBound(bound, f"{ROUNDED}{STEP}")),
    family("mamba_ssu_decode_float32", ErrorBound(lambda expected: expected.parts["error"], STEP)),
)
