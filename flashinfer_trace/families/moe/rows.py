"""Rows that were sorted by expert: copies, sums, and weighted sums at the end of a mixture of experts.

For weighted sums, SGLang's kernel after DeepGEMM adds in float32. Those after CUTLASS, and before SGLang 0.5.23 after
DeepGEMM as well, round weights, products and every partial sum to bf16. The last of these (0.5.11,
srt/layers/moe/ep_moe/kernels.py) skips ids that are not positive, so it leaves out expert 0 as well: its cases do not
choose that expert.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import called, calling
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.faults import with_inputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import (
    CONFIDENCE,
    ErrorBound,
    Expected,
    host_figures,
    rounding_error,
    summation_error,
    unit_roundoff,
)
from flashinfer_trace.verdict.copies import SameBits
from flashinfer_trace.verdict.tensors import as_integers, torch_dtype

#: ``positive``: no term cancels another, so a missing one shows.
KINDS = ("normal", "integers", "large", "tiny", "positive", "spread")
FACTORS = (2.5, 1.0, 0.75)
#: Which row each place of a copy takes: ``repeated`` takes few rows many times, ``reversed`` each once. In traffic,
#: ``routed``, each comes equally often, in any order.
MAPS = ("random", "repeated", "reversed")
FUSED_MOE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
#: With more tokens SGLang calls sgl_kernel.moe_sum_reduce.
MOST_TORCH_TOKENS = 32
TRITON_MODULE = "sglang.kernels.ops.moe.fused_moe_triton_kernels"


def drawn_rows(shape: list[int], kind: str, draws: Draws) -> torch.Tensor:
    if kind == "positive":
        return draws.normal(shape).abs_().to(torch.bfloat16)
    return draws.values(shape, torch.bfloat16, kind)


# Sums


#: More than 256 tokens, because sgl-kernel then launches another kernel. The corners have values beyond float16's
#: range, and a factor below it: float32 sums and products have the same relative errors.
SUM_PLAN = RowPlans(
    {"seq_len": Count(40, 600)},
    {"values": KINDS, "factor": FACTORS},
    special=[{"values": "huge"}, {"factor": 1e-6}],
    many_rows=300,
)


def reduce_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes = definition.const_axes
    shape = [plan["seq_len"], axes["top_k"], axes["hidden_size"]]
    return {"hidden_states": drawn_rows(shape, plan["values"], draws), "routed_scaling_factor": plan["factor"]}


def shuffle_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows sorted by expert, twice as many as pairs at least; with ``integers``, the factors are powers of two."""
    axes, count = definition.const_axes, plan["seq_len"]
    rows = 2 * count * axes["top_k"] + 1
    weights = draws.uniform([count, axes["top_k"]], 0.1, 1.0) * plan["factor"]
    if plan["values"] == "integers":
        weights = torch.exp2(draws.integers(weights.shape, -2, 2).float())
    return {
        "hidden_states": drawn_rows([rows, axes["hidden_size"]], plan["values"], draws),
        "permutation": draws.permutation(rows)[: count * axes["top_k"]].view(count, -1).to(torch.int32)
        if count
        else torch.zeros(0, axes["top_k"], dtype=torch.int32, device=draws.device),
        "factors": weights.to(torch.bfloat16),
    }


def weighted_sum(terms: torch.Tensor, exact: bool) -> dict[str, Expected]:
    parts = {"magnitude": terms.abs().sum(dim=1), "length": torch.tensor(float(terms.shape[1] + 1))}
    return {"output": Expected(terms.sum(dim=1), parts, exact and terms.numel() > 0)}


def is_integer(values: torch.Tensor) -> bool:
    return bool((values == values.round()).all())


def reduce_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each term is multiplied by the factor, before the sum. Small integers, and their sums, are exact in float32."""
    rows = inputs["hidden_states"].double()
    small = is_integer(rows) and bool((rows.abs() < 2**10).all())
    return weighted_sum(rows * float(inputs["routed_scaling_factor"]), small)


def shuffle_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Column by column of the permutation. Small integers, times powers of two, have exact sums."""
    rows, factors = inputs["hidden_states"].double(), inputs["factors"].double()
    places = inputs["permutation"].long().T
    terms = torch.stack([rows.index_select(0, place) for place in places], dim=1) * factors.unsqueeze(2)
    small = is_integer(rows) and bool((rows.abs() < 2**10).all()) and is_integer(factors * 4)
    return weighted_sum(terms, small)


def sum_bound(expected: Expected) -> torch.Tensor:
    inside = summation_error(expected.parts["magnitude"], int(expected.parts["length"]))
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside


SUM = ErrorBound(
    sum_bound,
    "one bf16 rounding, u = 2^-8, of a float32 sum of k terms times a factor: 8 sqrt(k + 1) 2^-24 of the terms; exact "
    "for small integers",
)

STEPWISE = ErrorBound(
    lambda expected: sum_bound(expected) + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8),
    f"{SUM.reason}; the sum is rounded to bf16 once more, before it is multiplied by the factor",
)

# Copies

#: The corners are the only row many times, one row of many, and rows of any bits.
COPY_PLAN = RowPlans(
    {"num_rows": Count(40, 600, least=1, corner=40), "num_copies": Count(60, 2000, usual=16, corner=60)},
    {"map": Drawn(lambda request: st.sampled_from(MAPS), "routed"), "contents": ("normal",)},
    special=[
        {"num_rows": 1, "map": "repeated"},
        {"num_copies": 1, "map": "random"},
        {"map": "random", "contents": "special"},
    ],
    many_rows=300,
)


def copy_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    rows, copies = plan["num_rows"], plan["num_copies"]
    source = draws.integers([copies], 0, rows - 1)
    if plan["map"] == "repeated":
        source = source % min(3, rows)
    elif plan["map"] == "reversed":
        source = torch.arange(copies, 0, -1, device=draws.device) % rows
    elif plan["map"] == "routed":
        source = draws.permutation(copies) % rows
    dtype = torch_dtype(definition.inputs["input"].dtype)
    values = draws.values([rows, definition.const_axes["hidden_size"]], dtype, plan["contents"], 16.0)
    return {"input": values, "dst2src_map": source.to(torch.int32)}


def copy_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    rows = as_integers(inputs["input"]).index_select(0, inputs["dst2src_map"].long())
    return {"output": Expected(rows.view(inputs["input"].dtype))}


def run_shuffle_rows(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    shape = {"shape": tuple(outputs["output"].shape)}
    return {"output": called("sgl_kernel.shuffle_rows", "input dst2src_map shape", definition, {**inputs, **shape})}


REDUCED = "hidden_states output routed_scaling_factor"
PAIRS = {"top_k": 5, "hidden_size": 24}
of_tokens = functools.partial(calling, limits=LAUNCHABLE)
ROW_FAMILIES = (
    Family(
        name="moe_sum_reduce",
        op_type="moe",
        twin={"top_k": 5, "hidden_size": 24},
        plan=SUM_PLAN,
        make_inputs=reduce_inputs,
        isolated=("hidden_states",),
        oracle=reduce_oracle,
        compare={"output": SUM},
        kernels=(
            of_tokens("sgl_kernel.moe_sum_reduce", REDUCED),
            of_tokens(f"{TRITON_MODULE}.moe_sum_reduce_triton", REDUCED),
            # SGLang's function for up to 32 tokens, without its decorator torch.compile.
            calling(
                f"{FUSED_MOE}.moe_sum_reduce_torch_compile",
                REDUCED,
                "eager",
                eager=True,
                limits={"seq_len": (1, MOST_TORCH_TOKENS)},
                compare={"output": STEPWISE},
            ),
        ),
    ),
    Family(
        name="moe_apply_shuffle_mul_sum",
        op_type="moe",
        twin={"top_k": 5, "hidden_size": 24},
        plan=SUM_PLAN,
        make_inputs=shuffle_inputs,
        oracle=shuffle_oracle,
        compare={"output": SUM},
        kernels=(of_tokens("sgl_kernel.apply_shuffle_mul_sum", "hidden_states output permutation.flatten factors"),),
    ),
    *(
        Family(
            name=f"moe_shuffle_rows{dtype}",
            op_type="moe",
            twin={"hidden_size": 16},
            plan=COPY_PLAN,
            make_inputs=copy_inputs,
            oracle=copy_oracle,
            compare={"output": SameBits()},
            kernels=(Kernel("sgl_kernel.shuffle_rows", run_shuffle_rows, limits={"num_copies": (1, 65536)}),),
        )
        for dtype in ("", "_fp8", "_fp32")
    ),
)

MODULE = "sglang.kernels.ops.moe.ep_moe_kernels"
BFLOAT16 = unit_roundoff(torch.bfloat16)
#: Which of a token's experts are on this rank: all, any number of them, or none for every other token.
CHOICES = ("all", "any", "some")
EXPERTS = 256


@dataclass(frozen=True)
class ReorderOptions:
    """The inputs that a kernel accepts: tokens that chose expert 0."""

    first_expert: bool = True


def reorder_corners(request: PlanRequest) -> list[Plan]:
    """Tokens without experts. On a CPU also values beyond float16's range, where the kernel has not been run, and
    expert 0 alone, which the kernel does not accept."""
    if request.large:
        return [{"choice": "some"}]
    first = [{"choice": "first"}] if request.options_of(ReorderOptions).first_expert else []
    return [{"choice": "some"}, {"values": "huge", "choice": "any"}, *first]


REORDER_PLAN = RowPlans(
    {"seq_len": Count(40, 600, corner=5)},
    {
        "values": KINDS,
        "choice": CHOICES,
        "lowest_id": lambda request: (0,) if request.options_of(ReorderOptions).first_expert else (1,),
    },
    special=reorder_corners,
    many_rows=300,
)


def reorder_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Rows sorted by expert, at least twice as many as pairs; those that no token names are NaN. With ``integers``, the
    weights are powers of two. The place of a pair elsewhere is beyond the rows."""
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


def reorder_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """All terms at once. Parts: ``magnitude``, the sum of their sizes; ``steps``, that of the partial sums' sizes;
    ``gain_variance``, of the errors along the output that bf16 makes: of products, partial sums, and shared weights."""
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


def stepwise_gain(expected: Expected) -> float:
    """The relative error of the output along itself, at 8 standard deviations."""
    size, variance = host_figures(expected.value.square().sum(), expected.parts["gain_variance"])
    return CONFIDENCE * math.sqrt(variance) / size if size else 0.0


STEP_BY_STEP = ErrorBound(
    lambda expected: (
        rounding_error(expected.value, torch.bfloat16)
        + (2 * expected.parts["magnitude"] + expected.parts["steps"]) * (BFLOAT16 * (1 + 2**-6))
    ),
    "weights, products and partial sums are rounded to bf16, u = 2^-8: u (2 sum |terms| + sum |partial sums|); their "
    "gain within 8 standard deviations",
    stepwise_gain,
)


def run_reorder(
    path: str, text: str, launched: bool, definition: Definition, inputs: Inputs, outputs: Outputs
) -> Outputs:
    """A kernel, or as SGLang launches it: a program for each token."""
    ids, places = inputs["topk_ids"], inputs["src2dst"]
    given = {
        **{"tokens": len(ids), "places": places.flatten()},
        # -1 for experts of other ranks, as the kernels that SGLang calls before these write them.
        "here": places.masked_fill(ids < 0, -1).flatten(),
    }
    called(path, text, definition, {**inputs, **outputs, **given}, grid=(len(ids),) if launched else None)
    return outputs


def reorder(path: str, text: str, launched: bool = True, **how: Any) -> Kernel:
    return Kernel(path, functools.partial(run_reorder, path, text, launched), limits=LAUNCHABLE, **how)


STEPS: dict[str, Any] = {"compare": {"output": STEP_BY_STEP}}

FAMILIES = (
    *ROW_FAMILIES,
    Family(
        name="moe_post_reorder",
        op_type="moe",
        twin={"top_k": 5, "hidden_size": 24},
        plan=REORDER_PLAN,
        make_inputs=reorder_inputs,
        oracle=reorder_oracle,
        compare={"output": SUM},
        kernels=(
            reorder(
                f"{MODULE}.post_reorder_deepgemm",
                "hidden_states output here topk_ids topk_weights top_k tokens hidden_size 1.0",
                launched=False,
            ),
            # Without a factor for the sum.
            reorder(
                f"{MODULE}.deepep_post_reorder_triton_kernel",
                "hidden_states output here topk_ids topk_weights top_k hidden_size 1.0 BLOCK_SIZE=512",
                **STEPS,
            ),
            # As SGLang 0.5.11 launched it.
            reorder(
                "sglang.srt.layers.moe.ep_moe.kernels.post_reorder_triton_kernel",
                "hidden_states output places topk_ids topk_weights top_k hidden_size BLOCK_SIZE=512",
                plan_options=ReorderOptions(first_expert=False),
                **STEPS,
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
