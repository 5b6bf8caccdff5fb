"""Routers with sigmoid scores and a bias, with DeepSeek-V3's groups or without."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import calling
from flashinfer_trace.families.moe.inputs import SPARE_ROWS, clear_rows, faint_logits, tied_logits
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.families.moe.oracle import grouped_choice, ranked
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import ErrorBound, Exact, Expected, rounding_error, unit_roundoff

U32 = unit_roundoff(torch.float32)
#: Roundings of a weight other than those of an exponent: exponentials (2 ulp, 4 of these) and reciprocals of two
#: sigmoids, a sum of up to 8, a division, and the products with the factor.
SINGLE_ROUNDINGS = 32
TOPK = "sglang.srt.layers.moe.topk"
KIMI_K2 = "sglang.kernels.ops.lora.moe.trtllm_lora_temp.kimi_k2_moe_fused_gate"
ONE_GROUP = "sglang.jit_kernel.grouped_topk"
#: flashinfer compiles with -use_fast_math, which turns tanhf into tanh.approx.f32: its relative error is up to 2^-11
#: (PTX ISA, "tanh"), and half of a tanh of at most 1 is a part of the score.
TANH_ERROR = 2.0**-12


@dataclass(frozen=True)
class RouterOptions:
    """The inputs that a kernel accepts, given how far its scores may be off, in addition to float32 roundings: whether
    all s + bias of a token may be negative, and equal ones of experts, where it chooses the lower index."""

    score_error: float = 0.0
    negative: bool = True
    ties: bool = True


REFERENCE = ErrorBound(
    lambda expected: rounding_error(expected.value, torch.float32) * (1 + 2**-20),
    "one float32 rounding of float64 scores",
)
IDS = Exact("best first, the lower index first among equal values; almost equal values are not drawn")


def weight_error(expected: Expected) -> torch.Tensor:
    return expected.value.abs() * U32 * (SINGLE_ROUNDINGS + 4 * expected.parts["reach"])


def with_absolute_error(expected: Expected, error: torch.Tensor | float) -> torch.Tensor:
    """`weight_error` where each score is off by up to `error` as well: in the numerator, and up to 8 in the sum."""
    relative = error / expected.parts["total"]
    return weight_error(expected) + relative * (expected.parts["factor"].abs() + 8 * expected.value.abs())


FLOAT32 = ErrorBound(weight_error, "float32 sigmoids, u = 2^-24: 4 u |logit| for the exponent, and 32 single roundings")
TANH = ErrorBound(
    lambda expected: with_absolute_error(expected, TANH_ERROR),
    "sigmoids computed as 0.5 tanh.approx(x / 2) + 0.5, off by up to 2^-12 however small they are, and 32 roundings",
)
FAST_EXP = ErrorBound(
    lambda expected: weight_error(expected) + expected.value.abs() * U32 * 4 * expected.parts["reach"],
    "float32 sigmoids from __expf, within 2 + 1.173 |x| ulp (CUDA C++ Programming Guide), u = 2^-24: 8 u |logit| for "
    "the exponents of a score and of the sum, and 32 single roundings",
)
UNBIASED = ErrorBound(
    lambda expected: with_absolute_error(expected, 2 * U32 * (1 + expected.parts["bias"])),
    "scores recovered as (s + bias) - bias, which loses 2 u (1 + |bias|), and 32 roundings",
)

LOGITS_AND_BIAS, IN_GROUPS = "routing_logits routing_bias", "n_group topk_group top_k"
SCALED = "num_fused_shared_experts=|0 routed_scaling_factor= apply_routed_scaling_factor_on_output=|True"
#: SGLang's Triton router, which took the place of sgl_kernel's, and that of Kimi-K2: their paths and arguments.
ROUTER_CALL = (
    "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
    f"{LOGITS_AND_BIAS} top_k {SCALED} num_expert_group=n_group topk_group=",
)
KIMI_K2_CALL = (
    f"{KIMI_K2}.kimi_k2_moe_fused_gate",
    f"{LOGITS_AND_BIAS} topk=top_k renormalize=True routed_scaling_factor= apply_routed_scaling_factor_on_output=True",
)


def router(path: str, text: str, bound: ErrorBound, variant: str = "", **how: Any) -> Kernel:
    """A kernel whose weights are within a bound; how it is called, see `calls`."""
    return calling(path, text, variant, limits=LAUNCHABLE, compare={"topk_weights": bound}, **how)


# The second best score of a group is the best of those below the best (SGLang 0.5.23, moe_fused_gate.py): where two
# experts share the best one, their group's score is too low.
GATES = (
    router("sgl_kernel.moe_fused_gate", f"{LOGITS_AND_BIAS} {IN_GROUPS} {SCALED}", FLOAT32),
    router(*ROUTER_CALL, FAST_EXP, plan_options=RouterOptions(ties=False)),
)
DEEPSEEK = (
    *GATES,
    # The kernel that the router above runs for these sizes, sorted: SGLang takes the choices in the order of experts.
    router(
        "sglang.kernels.ops.moe.moe_route_radix.route_radix",
        f"{LOGITS_AND_BIAS} top_k True routed_scaling_factor True sorted=True",
        FAST_EXP,
    ),
    router(
        "flashinfer.fused_moe.fused_topk_deepseek",
        f"{LOGITS_AND_BIAS} {IN_GROUPS} routed_scaling_factor topk_weights topk_ids",
        TANH,
        plan_options=RouterOptions(score_error=TANH_ERROR),
    ),
    # On an H200, of equal scores it chose expert 28 before expert 9.
    router(*KIMI_K2_CALL, FLOAT32, plan_options=RouterOptions(ties=False)),
    # It orders negative numbers by their magnitude: its key keeps their bits as they are (grouped_topk.cuh,
    # pack_val_idx).
    router(
        f"{ONE_GROUP}.grouped_topk",
        f"{LOGITS_AND_BIAS} 1 1 top_k True routed_scaling_factor",
        FAST_EXP,
        plan_options=RouterOptions(negative=False),
    ),
)
# SGLang's function without its decorator torch.compile; torch.topk chooses any of equal ones.
SHARED = (
    *GATES,
    router(
        f"{TOPK}.biased_grouped_topk_impl",
        f"routing_logits {LOGITS_AND_BIAS} top_k True n_group topk_group num_fused_shared_experts "
        "routed_scaling_factor apply_routed_scaling_factor_on_output",
        FLOAT32,
        "eager",
        eager=True,
        plan_options=RouterOptions(ties=False),
    ),
)
SIGMOID_CALL = "topk_weights topk_ids routing_logits norm_topk_prob correction_bias"
SIGMOID = (router("sgl_kernel.topk_sigmoid", SIGMOID_CALL, UNBIASED),)

#: ``peaked``: scores near 0 and 1; ``equal``: all logits of a token are equal; ``one_group``: one group is far better.
LOGITS = ("random", "peaked", "ties", "equal", "one_group")
#: ``large``: biases of 32 and 32.25 dwarf the scores, as those of trained models may; ``negative``: all s + bias are
#: below zero, so a kernel must not mark dropped experts by zero.
BIASES = ("zero", "small", "large", "negative")
FACTORS = (2.5, 1.0, 0.75)
#: The smallest gap between scores that are not equal, over 1 + |bias|: several float32 roundings of a sum of two.
GAP = 2.0**-18
#: The smallest logit of a chosen expert is above minus this: the logarithm of its score is far above that of float32's
#: smallest normal number, below which kernels may flush scores to 0. From about 17 on, scores are 1 in float32, and
#: from 37 on in float64 as well; between them float32 cannot tell experts apart, and no row is drawn in which it must.
LOGIT_RANGE = 30.0
#: Of corners: logits beyond float16's range, whose scores are 0 and 1; biases below 1e-5, far apart in a sum with a
#: score of 1, and biases that decide between scores of 1, further apart than errors of `TANH_ERROR` on both sides.
BEYOND_FLOAT16 = 99840.0
FAINT, RISING = 2.0**-17, 2.0**-10
#: How often inputs are drawn. With equal logits the bias alone decides: of 384 small ones, two neighbors among the
#: best are too close for every row in about 4 of 100 draws.
ATTEMPTS = 10


def logits_of(request: PlanRequest) -> list[str]:
    """For a kernel whose scores are off, none that are too close: near 0 and 1, or apart by the bias alone."""
    options = request.options_of(RouterOptions)
    left_out = {*(("peaked", "equal") if options.score_error else ()), *(() if options.ties else ("ties", "equal"))}
    return [kind for kind in LOGITS if kind not in left_out]


def biases_of(request: PlanRequest) -> st.SearchStrategy[str]:
    negative = request.options_of(RouterOptions).negative
    return st.sampled_from([kind for kind in BIASES if negative or kind != "negative"])


def corners(request: PlanRequest) -> list[Plan]:
    """Ties under a bias that decides them; logits and biases beyond float16's range; equal logits with biases below
    1e-5, and near -22 (-31.5 on a CPU). The equal ones are left out if any of them may be chosen, or if scores
    are coarse and 0 there."""
    options = request.options_of(RouterOptions)
    ties = [{"routing": "ties"}] if options.ties else []
    least = "faint" if request.large else "faintest"
    faint = [{"routing": "equal", "bias": "faint"}, {"routing": least, "bias": "zero"}]
    beyond: list[Plan] = [{"bias": "beyond_float16", "flag": False}, {"routing": "beyond_float16", "bias": "rising"}]
    return [*ties, *beyond, *(faint if options.ties and not options.score_error else [])]


PLAN = RowPlans(
    {"seq_len": Count(96, 2048)},
    {
        "routing": logits_of,
        "bias": Drawn(biases_of, "small"),
        "factor": FACTORS,
        "flag": (True, False),
        "score_error": lambda request: (request.options_of(RouterOptions).score_error,),
        "ties": lambda request: (request.options_of(RouterOptions).ties,),
    },
    special=corners,
    many_rows=300,
)


def draw_bias(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    shape = [definition.const_axes["num_experts"]]
    if plan["bias"] == "beyond_float16":
        return torch.arange(1, shape[0] + 1, device=draws.device) * 65536.0
    if plan["bias"] == "rising":
        return torch.arange(shape[0], device=draws.device) * RISING
    if plan["bias"] == "faint":
        # In turns, so each group has two of the largest, and groups tie.
        return (torch.arange(shape[0], device=draws.device) % 3 - 1) * FAINT
    if plan["bias"] == "large":
        return draws.integers(shape, 0, 1).float() * 0.25 + 32
    if plan["bias"] == "negative":
        return draws.normal(shape, scale=0.05) - 3
    return draws.normal(shape, scale=0.05) if plan["bias"] == "small" else torch.zeros(shape, device=draws.device)


def draw_logits(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
    experts, groups = definition.const_axes["num_experts"], definition.const_axes.get("n_group", 1)
    shape = [plan["seq_len"] + SPARE_ROWS, experts]
    logits = draws.normal(shape) * (3.0 if plan["routing"] == "peaked" else 1.0)
    if plan["routing"] == "ties":
        logits = tied_logits(shape, draws)
    elif plan["routing"] == "equal":
        logits = logits[:, :1].expand(shape).contiguous()
    elif plan["routing"] in ("faint", "faintest"):
        logits = faint_logits(logits, plan["routing"])
    elif plan["routing"] == "beyond_float16":
        # Three of four are large, enough of them in few groups.
        logits = torch.where(logits < 0.67, BEYOND_FLOAT16, -BEYOND_FLOAT16)
    elif plan["routing"] == "one_group":
        logits[:, experts // groups :] -= 4
    return logits


def routed_count(definition: Definition) -> int:
    axes = definition.const_axes
    return axes["top_k"] - axes.get("num_fused_shared_experts", 0)


def decidable(
    definition: Definition,
    logits: torch.Tensor,
    bias: torch.Tensor,
    score_error: float = 0.0,
    ties: bool = True,
    any_logit: bool = False,
) -> torch.Tensor:
    """Rows whose choice and order float32 cannot change: neighbors are equal, or farther apart than their errors. Two
    pairs of experts with the same sum need not tie, so groups must differ or have equal best experts. Without `ties`,
    none may be equal. With `any_logit`, scores may be smaller than `LOGIT_RANGE`: no kernel gets those."""
    candidates, groups = grouped_choice(definition, torch.sigmoid(logits.double()) + bias.double())
    smallest = GAP * (1 + float(bias.double().abs().max())) + 2 * score_error
    ordered, order = candidates.sort(dim=1, descending=True)
    ordered = ordered[:, : routed_count(definition) + 1]
    clear = logits.gather(1, order[:, : routed_count(definition)]).amin(dim=1) > (
        -math.inf if any_logit else -LOGIT_RANGE
    )
    gaps = ordered[:, :-1] - ordered[:, 1:]
    clear &= ((ties & (gaps == 0)) | (gaps > smallest)).all(dim=1)
    kept = definition.const_axes.get("topk_group", 1)
    if kept < groups.shape[1]:
        ordered = groups.sort(dim=1, descending=True).values
        gap = ordered[:, kept - 1] - ordered[:, kept]
        clear &= (ties & (gap == 0)) | (gap > 2 * smallest)
    return clear


def router_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Logits and a bias that decide the choice in some row; that row takes the place of the undecidable ones."""
    for _ in range(ATTEMPTS):
        bias, logits = draw_bias(definition, plan, draws), draw_logits(definition, plan, draws)
        faintest = plan["routing"] == "faintest"
        clear = decidable(definition, logits, bias, plan["score_error"], plan["ties"], any_logit=faintest)
        if clear.any():
            break
    logits = clear_rows(logits, clear, plan["seq_len"])
    known = {
        "routing_logits": logits,
        "routing_bias": bias,
        "correction_bias": bias,
        "routed_scaling_factor": plan["factor"],
        "apply_routed_scaling_factor_on_output": plan["flag"],
        "norm_topk_prob": plan["flag"],
    }
    return {name: known[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The chosen experts by counting ranks, not by sorting, and their weights. Parts of the weights: ``reach``, the
    largest |logit| of a row's chosen experts; ``total``, what their scores are divided by (1 if by nothing); ``share``,
    the largest weight of a sum of one; ``factor``; ``bias``, the largest."""
    logits = inputs["routing_logits"].double()
    bias = inputs["routing_bias" if "routing_bias" in inputs else "correction_bias"].double()
    scores = 1 / (1 + torch.exp(-logits))
    candidates, _ = grouped_choice(definition, torch.sigmoid(logits) + bias)
    ids = routed = ranked(candidates, routed_count(definition))
    chosen = scores.gather(1, ids)
    divided = bool(inputs.get("norm_topk_prob", True))
    total = chosen.sum(dim=1, keepdim=True) if divided else torch.ones_like(chosen[:, :1])
    factor = float(inputs.get("routed_scaling_factor", 1.0))
    weights = chosen / total
    experts, shared = logits.shape[1], definition.const_axes.get("num_fused_shared_experts", 0)
    if shared:
        own = torch.arange(experts, experts + shared, device=ids.device).expand(len(ids), shared)
        ids = torch.cat([ids, own], dim=1)
        weights = torch.cat([weights, torch.full_like(own, 1 / factor, dtype=torch.float64)], dim=1)
        factor = factor if inputs["apply_routed_scaling_factor_on_output"] else 1.0
    parts = {
        "reach": logits.gather(1, routed).abs().amax(dim=1, keepdim=True),
        "total": total,
        "factor": torch.tensor(factor, dtype=torch.float64),
        "bias": bias.abs().max(),
    }
    return {"topk_weights": Expected(weights * factor, parts), "topk_ids": Expected(ids)}


def family(
    name: str, twin: Mapping[str, int], its_kernels: tuple[Kernel, ...], unseen: Mapping[str, str] | None = None
) -> Family:
    return Family(
        name=name,
        op_type="moe",
        twin=twin,
        plan=PLAN,
        make_inputs=router_inputs,
        oracle=oracle,
        compare={"topk_weights": REFERENCE, "topk_ids": IDS},
        kernels=its_kernels,
        unseen=unseen or {},
    )


SAME_FOR_ALL = (
    "The last column is the weight of a shared expert, which is the same for every token, up to the rounding of a "
    "quotient that kernels take of each row."
)
#: Four groups of eight experts; two groups are kept.
GROUPS = {"num_experts": 32, "n_group": 4, "topk_group": 2}
FAMILIES = (
    family("moe_topk_deepseek", {**GROUPS, "top_k": 6}, DEEPSEEK),
    family(
        "moe_topk_deepseek_shared_experts",
        {**GROUPS, "top_k": 8, "num_fused_shared_experts": 2},
        SHARED,
        {"topk_weights: a stale last column": SAME_FOR_ALL},
    ),
    family("moe_topk_sigmoid", {"num_experts": 16, "top_k": 6}, SIGMOID),
)
