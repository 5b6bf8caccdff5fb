"""DeepSeek-V3 routing with experts in fp8 blocks: what plans draw, and the record."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.moe.deepseek_kernels import KERNELS, RoutingOptions
from flashinfer_trace.families.moe.inputs import (
    FEW_TOKENS,
    FP8_TWIN,
    ROUTINGS,
    SPARE_ROWS,
    VALUES,
    clear_rows,
    experts_family,
    faint_logits,
    fp8_experts,
    ranks_of,
    spoil_unchosen,
    tied_logits,
)
from flashinfer_trace.families.moe.oracle import in_groups, oracle, route
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans

#: ``large`` biases dwarf the scores, as those of trained models may: s + bias then loses bits in float32. With
#: ``negative`` ones all s + bias are below zero, so that what is dropped must not be marked by zero.
BIASES = ("zero", "small", "large", "negative")
FACTORS = (2.5, 1.0, 0.75)
#: Smallest gap between a chosen and a rejected score, over 1 + |bias|: several float32 roundings of a sum of two.
GAP = 2.0**-18


def few_stay_local(request: PlanRequest, plan: Plan) -> Plan:
    """Few tokens choose local experts only; otherwise most would choose none on this rank, and prove nothing."""
    few = plan["seq_len"] < FEW_TOKENS and plan["routing"] != "elsewhere"
    return {**plan, "routing": "local"} if few else plan


def corners(request: PlanRequest) -> list[Plan]:
    """Experts with exactly one token; negative biases; for the kernels that take them, sums of scores near 1e-9,
    on a CPU 1e-13; biases and hidden states beyond float16's range, only on a CPU.

    It was never seen what the kernels of the experts make of those (`softmax.corners` says why it matters).
    """
    options = request.options_of(RoutingOptions)
    routing = "faint" if request.large else "faintest"
    faint = [{"routing": routing, "bias": "zero"}] if options.ties and options.faint else []
    found: list[Plan] = [{"seq_len": 1, "routing": "local"}, {"routing": "local", "bias": "negative"}, *faint]
    if request.large:
        return found
    return [*found, {"bias": "beyond_float16", "values": "huge", "rank": ranks_of(request)[-1]}]


def routings_of(request: PlanRequest) -> list[str]:
    return [one for one in ROUTINGS if one != "ties" or request.options_of(RoutingOptions).ties]


PLAN = RowPlans(
    {"seq_len": Count(96, 300)},
    {
        "routing": routings_of,
        "bias": Drawn(lambda request: st.sampled_from(BIASES), "small"),
        "values": tuple(VALUES),
        "zero_row": FLAG,
        "rank": ranks_of,
        "factor": FACTORS,
        "ties": lambda request: (request.options_of(RoutingOptions).ties,),
    },
    special=corners,
    fit=few_stay_local,
    many_rows=300,
)


def draw_bias(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    """bfloat16 [num_experts]. Large biases are 32 or 32.25, which are neighbors in bfloat16."""
    shape = [definition.const_axes["num_experts"]]
    if plan["bias"] == "beyond_float16":
        return (torch.arange(1, shape[0] + 1, device=draws.device) * 65536.0).to(torch.bfloat16)
    if plan["bias"] == "large" and plan["routing"] != "one_expert":
        return (draws.integers(shape, 0, 1).float() * 0.25 + 32).to(torch.bfloat16)
    level = -3.0 if plan["bias"] == "negative" else 0.0
    if plan["bias"] in ("small", "negative") and plan["routing"] not in ("one_expert", "ties"):
        return draws.normal(shape, torch.bfloat16, 0.05) + level
    return torch.full(shape, level, dtype=torch.bfloat16, device=draws.device)


def decidable(definition: Definition, logits: torch.Tensor, bias: torch.Tensor, ties: bool = True) -> torch.Tensor:
    """Rows whose choice float32 cannot change: each boundary is an exact tie, or a gap larger than rounding errors.

    Equal logits with equal biases tie in any arithmetic; almost equal scores do not. Without `ties`, none may be
    equal.
    """
    axes = definition.const_axes
    choice = in_groups(torch.sigmoid(logits.double()) + bias.double(), axes["n_group"])
    group_scores = choice.topk(2, dim=2).values.sum(dim=2)
    order = group_scores.argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, order[:, : axes["topk_group"]], True)
    candidates = choice.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
    smallest = GAP * (1 + float(bias.double().abs().max()))
    clear = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    for scores, count in ((group_scores, axes["topk_group"]), (candidates, axes["top_k"])):
        if count < scores.shape[1]:
            ordered = scores.sort(dim=1, descending=True).values
            gap = ordered[:, count - 1] - ordered[:, count]
            clear &= (ties & (gap == 0)) | (gap > smallest)
    return clear


def draw_logits(definition: Definition, plan: Plan, bias: torch.Tensor, draws: Draws) -> torch.Tensor:
    """float32 [seq_len, num_experts]; undecidable rows are replaced by the first decidable one."""
    axes, count = definition.const_axes, plan["seq_len"]
    shape = [count + SPARE_ROWS, axes["num_experts"]]
    first = plan["rank"] * axes["num_local_experts"]
    here = slice(first, first + axes["num_local_experts"])
    logits = tied_logits(shape, draws) if plan["routing"] == "ties" else draws.normal(shape)
    if plan["routing"] in ("faint", "faintest"):
        logits = faint_logits(logits, plan["routing"])
    if plan["routing"] == "local":
        logits -= 4
        logits[:, here] += 8
    elif plan["routing"] in ("one_expert", "elsewhere"):
        logits[:, here] -= 8
    if plan["routing"] == "one_expert":
        # Its group must be kept for one good expert: experts elsewhere are weak, but better than the others here.
        logits -= 3
        logits[:, first + axes["num_local_experts"] // 2] += 19
    return clear_rows(logits, decidable(definition, logits, bias, plan["ties"]), count)


def make_inputs(
    experts: Callable[[Definition, Plan, Draws], Inputs], definition: Definition, plan: Plan, draws: Draws
) -> Inputs:
    """Inputs whose activations and weights `experts` makes."""
    bias = draw_bias(definition, plan, draws)
    found = {
        "routing_logits": draw_logits(definition, plan, bias, draws),
        "routing_bias": bias,
        **experts(definition, plan, draws),
        "local_expert_offset": plan["rank"] * definition.const_axes["num_local_experts"],
        "routed_scaling_factor": plan["factor"],
    }
    return spoil_unchosen(definition, plan, found, lambda: route(definition, found) > 0)


FAMILIES = (
    experts_family(
        "moe_fp8_block_scale_ds_routing",
        FP8_TWIN,
        PLAN,
        functools.partial(make_inputs, fp8_experts),
        oracle,
        KERNELS,
    ),
)
