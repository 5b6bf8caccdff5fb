"""Softmax routing, alone and with the experts in bfloat16 or in fp8 blocks: what plans draw, and the records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.moe import softmax_kernels as kernels
from flashinfer_trace.families.moe.inputs import (
    FEW_TOKENS,
    FP8_TWIN,
    ROUTINGS,
    SPARE_ROWS,
    TWIN,
    VALUES,
    clear_rows,
    experts_family,
    fp8_experts,
    hidden_values,
    ranks_of,
    spoil_unchosen,
    tied_logits,
)
from flashinfer_trace.families.moe.oracle import bf16_softmax_oracle, fp8_softmax_oracle, topk_softmax_oracle
from flashinfer_trace.families.quantized import chosen_by_rank
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans

#: For the router alone. ``peaked``: a token's weights span many orders of magnitude; ``equal``: all logits are equal.
LOGITS = ("random", "peaked", "ties", "one_expert", "equal")
#: The smallest difference of neighboring logits, about 200 roundings of a float32 softmax; and the largest distance of
#: a chosen logit from the best, at which exp is still far above the smallest normal number, 2^-126.
GAP, REACH = 2.0**-16, 80.0
#: For a kernel that rounds probabilities to bf16: logits of this size, whose neighbors are at least BF16_GAP apart.
#: Probabilities of such logits differ by more than neighboring bf16 numbers, which are at most 2^-7 apart.
WIDE = {"wide": 4.0, "wide_peaked": 12.0}
BF16_GAP = 2.0**-6
#: Of a corner: logits of FAINT_LEVELS times this are below 1e-5, and 64 roundings of a number below 1 apart: more than
#: those of a float32 exponential, its argument and its division by a sum together, which are the same for equal logits.
FAINT, FAINT_LEVELS = 2.0**-18, 2
GAPS = {**dict.fromkeys(WIDE, BF16_GAP), "faint": FAINT / 2}


def decidable(logits: torch.Tensor, top_k: int, gap: float = GAP) -> torch.Tensor:
    """Rows whose chosen experts, and their order, a float32 softmax cannot change.

    Each chosen logit equals the next smaller one or is clearly above it. Equal logits tie in any arithmetic; a wider
    `gap` is for kernels that round more and choose any of equal ones.
    """
    ordered = logits.double().sort(dim=1, descending=True).values
    gaps = (ordered[:, :-1] - ordered[:, 1:])[:, :top_k]
    within = ordered[:, 0] - ordered[:, top_k - 1] < REACH
    tied = (gaps == 0) & (gap <= GAP)
    return (tied | (gaps > gap)).all(dim=1) & within


def draw_logits(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    """bfloat16 [seq_len, num_experts]; undecidable rows are replaced by the first decidable one."""
    axes, count, routing = definition.const_axes, plan["seq_len"], plan["routing"]
    experts, top_k = axes["num_experts"], axes["top_k"]
    shape = [count + SPARE_ROWS, experts]
    local = axes.get("num_local_experts", 1)
    first = plan["rank"] * local
    here = slice(first, first + local)
    logits = draws.normal(shape) * {"peaked": 12.0, **WIDE}.get(routing, 1.0)
    if routing == "ties":
        logits = tied_logits(shape, draws)
    elif routing == "faint":
        logits = draws.integers(shape, -FAINT_LEVELS, FAINT_LEVELS) * FAINT
    elif routing == "beyond_float16":
        end = first + local
        logits = torch.full(shape, 70144.0, device=draws.device)
        logits[:, max(0, end - top_k) : end] = 99840.0
    elif routing == "equal":
        logits = logits[:, :1].expand(shape).contiguous()
    elif routing == "local":
        logits[:, here] += 8
    elif routing in ("one_expert", "elsewhere") and experts - local >= top_k - 1:
        logits[:, here] -= 12
    if routing == "one_expert":
        # Where the other choices are local too, their weights stay large enough to matter.
        logits[:, first + local // 2] += 8 if experts == local else 18
    rounded = logits.to(torch.bfloat16)
    return clear_rows(rounded, decidable(rounded, top_k, GAPS.get(routing, GAP)), count)


# The router alone


def router_corners(request: PlanRequest) -> list[Plan]:
    """Logits beyond float16's range, the largest for the last experts, and logits below 1e-5.

    Not for kernels that choose any of equal logits, or round probabilities to bf16: the chosen ones are equal in both.
    """
    if not request.options_of(kernels.SoftmaxOptions).exact:
        return []
    last = {"rank": request.definition.const_axes["num_experts"] - 1, "norm": False}
    return [{**last, "routing": "beyond_float16"}, {**last, "routing": "faint"}]


def router_logits(request: PlanRequest) -> st.SearchStrategy[str]:
    return st.sampled_from(LOGITS if request.options_of(kernels.SoftmaxOptions).exact else tuple(WIDE))


def router_norm(request: PlanRequest) -> st.SearchStrategy[bool]:
    return st.booleans() if request.options_of(kernels.SoftmaxOptions).exact else st.just(False)


ROUTER_PLAN = RowPlans(
    {"seq_len": Count(96, 2048)},
    {
        "routing": Drawn(router_logits, "random"),
        "rank": lambda request: range(request.definition.const_axes["num_experts"]),
        "norm": Drawn(router_norm, True),
    },
    special=router_corners,
    many_rows=300,
)


def router_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    return {"routing_logits": draw_logits(definition, plan, draws), "norm_topk_prob": plan["norm"]}


# With the experts


def with_something_to_show(request: PlanRequest, plan: Plan) -> Plan:
    """Few tokens choose local experts; ``elsewhere`` is drawn only where the other ranks have enough experts."""
    axes = request.definition.const_axes
    if plan["routing"] == "elsewhere":
        can_leave = axes["num_experts"] - axes["num_local_experts"] >= axes["top_k"]
        return plan if can_leave else {**plan, "routing": "random"}
    few = len(ranks_of(request)) > 1 and plan["seq_len"] < FEW_TOKENS
    return {**plan, "routing": "local"} if few else plan


def corners(request: PlanRequest) -> list[Plan]:
    """Experts with exactly one token; logits and hidden states beyond float16's range, only on a CPU.

    It was never seen what the kernels of the experts make of those: the bounds hold for what they round in float32 and
    bf16, but scales of blocks are numbers that they choose.
    """
    one: Plan = {"seq_len": 1, "routing": "local"}
    if request.large:
        return [one]
    return [one, {"routing": "beyond_float16", "values": "huge", "rank": ranks_of(request)[-1]}]


PLAN = RowPlans(
    {"seq_len": Count(96, 300)},
    {"routing": ROUTINGS, "values": tuple(VALUES), "zero_row": FLAG, "rank": ranks_of, "norm": (True, False)},
    special=corners,
    fit=with_something_to_show,
    many_rows=300,
)


def expert_inputs(
    draw_experts: Callable[[Definition, Plan, Draws], Inputs],
) -> Callable[[Definition, Plan, Draws], Inputs]:
    """Inputs whose activations and weights `draw_experts` makes."""

    def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
        logits = draw_logits(definition, plan, draws)
        tensors = draw_experts(definition, plan, draws)
        offset = plan["rank"] * definition.const_axes["num_local_experts"]
        found = {"routing_logits": logits, **tensors, "local_expert_offset": offset, "norm_topk_prob": plan["norm"]}
        top_k = definition.const_axes["top_k"]
        return spoil_unchosen(definition, plan, found, lambda: chosen_by_rank(logits.double(), top_k))

    return make_inputs


def bf16_experts(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Weights like trained ones: products keep the magnitude of their inputs."""
    axes = definition.const_axes
    experts, hidden_size, size = axes["num_local_experts"], axes["hidden_size"], axes["intermediate_size"]
    return {
        "hidden_states": hidden_values(definition, plan, draws).to(torch.bfloat16),
        "gemm1_weights": draws.matrices([experts, 2 * size, hidden_size], torch.bfloat16, "normal", hidden_size**-0.5),
        "gemm2_weights": draws.matrices([experts, hidden_size, size], torch.bfloat16, "normal", size**-0.5),
    }


FAMILIES = (
    Family(
        name="moe_topk_softmax",
        op_type="moe",
        twin={"num_experts": 16},
        plan=ROUTER_PLAN,
        make_inputs=router_inputs,
        oracle=topk_softmax_oracle,
        compare={"topk_weights": kernels.TOPK_WEIGHTS_REFERENCE, "topk_ids": kernels.TOPK_IDS},
        kernels=kernels.TOPK_SOFTMAX,
    ),
    experts_family(
        "moe_bf16_softmax_routing", TWIN, PLAN, expert_inputs(bf16_experts), bf16_softmax_oracle, kernels.BF16_KERNELS
    ),
    experts_family(
        "moe_fp8_block_scale_softmax_routing",
        FP8_TWIN,
        PLAN,
        expert_inputs(fp8_experts),
        fp8_softmax_oracle,
        kernels.FP8_KERNELS,
    ),
)
