"""The end of a mixture of experts: weighted sums of rows that lie sorted by expert.

SGLang's kernel behind DeepGEMM adds in float32. Those behind CUTLASS, and before SGLang 0.5.23 behind DeepGEMM as well,
round weights, products and every partial sum to bf16. The last of these (0.5.11, srt/layers/moe/ep_moe/kernels.py)
skips ids that are not positive, so it leaves out expert 0 as well: its cases do not choose that expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.families.moe.rows import KINDS, SUM, drawn_rows
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    host_figures,
    rounding_error,
    unit_roundoff,
)

MODULE = "sglang.kernels.ops.moe.ep_moe_kernels"
BFLOAT16 = unit_roundoff(torch.bfloat16)
#: Which of a token's experts are on this rank: all, any number of them, or none for every other token.
CHOICES = ("all", "any", "some")
EXPERTS = 256


@dataclass(frozen=True)
class ReorderOptions:
    """What a kernel takes. Attributes: first_expert: tokens that chose expert 0."""

    first_expert: bool = True


def corners(request: PlanRequest) -> list[Plan]:
    """Tokens without experts; on a CPU also values beyond float16's range, of which it was never seen what the kernel
    makes, and expert 0 alone, which the kernel does not take."""
    if request.large:
        return [{"choice": "some"}]
    first = [{"choice": "first"}] if request.options_of(ReorderOptions).first_expert else []
    return [{"choice": "some"}, {"values": "huge", "choice": "any"}, *first]


PLAN = RowPlans(
    {"seq_len": Count(40, 600, corner=5)},
    {
        "values": KINDS,
        "choice": CHOICES,
        "lowest_id": lambda request: (0,) if request.options_of(ReorderOptions).first_expert else (1,),
    },
    special=corners,
    many_rows=300,
)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows sorted by expert, twice as many as pairs at least; those that no token names are NaN.

    With ``integers``, the weights are powers of two. The place of a pair elsewhere is beyond the rows.
    """
    axes, count = definition.const_axes, plan["seq_len"]
    shape = [count, axes["top_k"]]
    rows = 2 * count * axes["top_k"] + 1
    ids = draws.integers(shape, plan["lowest_id"], EXPERTS - 1)
    if plan["choice"] == "any":
        ids = ids.masked_fill(draws.uniform(shape) < 0.4, -1)
    elif plan["choice"] == "some":
        ids[::2] = -1
    elif plan["choice"] == "first":
        ids.zero_()
    weights = draws.uniform(shape, 0.1, 1.0)
    if plan["values"] == "integers":
        weights = torch.exp2(draws.integers(shape, -2, 2).float())
    places = draws.permutation(rows)[: count * axes["top_k"]].view(shape)
    values = drawn_rows([rows, axes["hidden_size"]], plan["values"], draws)
    unnamed = torch.ones(rows, dtype=torch.bool, device=draws.device).index_fill(0, places[ids >= 0], False)
    return {
        "hidden_states": values.masked_fill(unnamed.unsqueeze(1), torch.nan),
        "src2dst": places.masked_fill(ids < 0, rows + 7).to(torch.int32),
        "topk_ids": ids.to(torch.int32),
        "topk_weights": weights,
    }


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """All terms at once. Parts: ``magnitude``, the sum of their sizes; ``steps``, that of the partial sums' sizes.

    ``gain_variance`` is that of the errors along the output, which roundings to bf16 make: of each product and partial
    sum, and of a weight, whose error a token's features share.
    """
    here = (inputs["topk_ids"] >= 0).unsqueeze(2)
    rows = inputs["hidden_states"].double()
    places = inputs["src2dst"].long().clamp_max(len(rows) - 1)
    terms = torch.where(here, rows[places] * inputs["topk_weights"].double().unsqueeze(2), 0.0)
    value, steps = terms.sum(dim=1), terms.cumsum(dim=1)
    single = (terms.square().sum(dim=1) + steps.square().sum(dim=1)) * value.square()
    shared = (terms * value.unsqueeze(1)).sum(dim=2).square()
    parts = {
        "magnitude": terms.abs().sum(dim=1),
        "length": torch.tensor(float(terms.shape[1] + 1)),
        "steps": steps.abs().sum(dim=1),
        "gain_variance": (single.sum() + shared.sum()) * (BFLOAT16**2 / 3),
    }
    return {"output": Expected(value, parts)}


def stepwise_bound(expected: Expected) -> torch.Tensor:
    inside = 2 * expected.parts["magnitude"] + expected.parts["steps"]
    return rounding_error(expected.value, torch.bfloat16) + inside * (BFLOAT16 * (1 + 2**-6))


def stepwise_gain(expected: Expected) -> float:
    """The relative error of the output along itself, at 8 standard deviations."""
    size, variance = host_figures(expected.value.square().sum(), expected.parts["gain_variance"])
    return CONFIDENCE * math.sqrt(variance) / size if size else 0.0


STEPWISE = ErrorBound(
    stepwise_bound,
    "weights, products and partial sums are rounded to bf16, u = 2^-8: u (2 sum |terms| + sum |partial sums|); their "
    "gain within 8 standard deviations",
    stepwise_gain,
)


def arguments(definition: Definition, inputs: Inputs, outputs: Outputs, places: torch.Tensor) -> tuple[Any, ...]:
    """What every kernel takes first."""
    tensors = (inputs["hidden_states"], outputs["output"], places.flatten(), inputs["topk_ids"], inputs["topk_weights"])
    return (*tensors, definition.const_axes["top_k"])


def places_here(inputs: Inputs) -> torch.Tensor:
    """Places, and -1 for experts of other ranks, as the kernels that SGLang calls before these write them."""
    places: torch.Tensor = inputs["src2dst"]
    return places.masked_fill(inputs["topk_ids"] < 0, -1)


def run_deep_gemm(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.moe.ep_moe_kernels import post_reorder_deepgemm

    places, size = places_here(inputs), definition.const_axes["hidden_size"]
    post_reorder_deepgemm(*arguments(definition, inputs, outputs, places), len(places), size, 1.0)
    return outputs


def run_deepep(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang launches it, without a factor for the sum: a program for each token."""
    from sglang.kernels.ops.moe.ep_moe_kernels import deepep_post_reorder_triton_kernel

    places, size = places_here(inputs), definition.const_axes["hidden_size"]
    given = arguments(definition, inputs, outputs, places)
    deepep_post_reorder_triton_kernel[(len(places),)](*given, size, 1.0, BLOCK_SIZE=512)
    return outputs


def run_triton(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang 0.5.11 launched it."""
    from sglang.srt.layers.moe.ep_moe.kernels import post_reorder_triton_kernel

    places, size = inputs["src2dst"], definition.const_axes["hidden_size"]
    post_reorder_triton_kernel[(len(places),)](*arguments(definition, inputs, outputs, places), size, BLOCK_SIZE=512)
    return outputs


LAUNCHED: dict[str, Any] = {"limits": LAUNCHABLE, "compare": {"output": STEPWISE}}

FAMILIES = (
    Family(
        name="moe_post_reorder",
        op_type="moe",
        twin={"top_k": 5, "hidden_size": 24},
        plan=PLAN,
        make_inputs=make_inputs,
        oracle=oracle,
        compare={"output": SUM},
        kernels=(
            Kernel(f"{MODULE}.post_reorder_deepgemm", run_deep_gemm, limits=LAUNCHABLE),
            Kernel(f"{MODULE}.deepep_post_reorder_triton_kernel", run_deepep, **LAUNCHED),
            Kernel(
                "sglang.srt.layers.moe.ep_moe.kernels.post_reorder_triton_kernel",
                run_triton,
                plan_options=ReorderOptions(first_expert=False),
                **LAUNCHED,
            ),
        ),
        faults=(
            with_inputs(
                "weights of other experts",
                lambda inputs, trial: {**inputs, "topk_weights": inputs["topk_weights"].roll(1, dims=1)},
            ),
        ),
    ),
)
