"""Softmax routing: alone, with the experts in bfloat16 or fp8 blocks, and with the chosen rows sorted by expert."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import called, calling
from flashinfer_trace.families.moe import kernels
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
from flashinfer_trace.families.moe.oracle import BF16, FP8_BLOCKS, experts_oracle, softmax_route, topk_softmax_oracle
from flashinfer_trace.families.quantized import chosen_by_rank, ranks
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import FLAG, Count, Drawn, RowPlans
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Exact, Expected, rounding_error, unit_roundoff

FUSED_EXPERTS = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
TOPK = "sglang.srt.layers.moe.topk"
U32 = unit_roundoff(torch.float32)
#: Roundings of one weight other than those of its exponent and of sums: exponential (2 ulp, 4 of these), reciprocal,
#: two products, and for norm_topk_prob a sum of up to 8 and a division.
SINGLE_ROUNDINGS = 24
#: Tensor cores add to a float32 accumulator in steps of 16 products and may drop what does not fit: at most 2^10 steps,
#: and each drops less than one unit, 2^-23 of the sum; in up, gate and down.
BF16_TRUNCATION_GAIN = 3 * 2.0**-13


@dataclass(frozen=True)
class SoftmaxOptions:
    """The inputs that a router accepts. `exact`: equal logits, where it prefers the lower index, any others that
    float32 tells apart, and norm_topk_prob; otherwise only logits whose probabilities differ in bf16."""

    exact: bool = True


def topk_weights_bound(expected: Expected) -> torch.Tensor:
    experts = float(expected.parts["experts"])
    common = SINGLE_ROUNDINGS + CONFIDENCE * math.sqrt(experts) + 2 * math.log(experts)
    relative = (2 * expected.parts["distance"] + common) * U32
    return expected.value * relative + torch.finfo(torch.float32).smallest_normal


TOPK_WEIGHTS = ErrorBound(
    topk_weights_bound,
    "a float32 softmax, u = 2^-24, with 2 u (max - l) for the exponent, 8 sqrt(experts) u for the sum, 2 ln(experts) u "
    "for its exponents, and 24 single roundings",
)
TOPK_WEIGHTS_REFERENCE = ErrorBound(
    lambda expected: rounding_error(expected.value, torch.float32) * (1 + 2**-20),
    "one float32 rounding of a float64 softmax",
)
BF16_WEIGHTS = ErrorBound(
    lambda expected: topk_weights_bound(expected) + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8),
    f"one bf16 rounding, u = 2^-8, of {TOPK_WEIGHTS.reason}",
)
TOPK_IDS = Exact(
    "best first, the lower index first among equal logits; logits too close for float32 to distinguish are not drawn"
)
BF16_HOPPER = kernels.bound(
    "hopper",
    "8 standard deviations of what the pipeline rounds: gemm1, silu * up, results and weights to bf16, float32 sums; "
    "for the scale of all elements, 5 standard deviations and 3 * 2^-13 for dropped bits, plus the computed effect of "
    "rounding these weighted results",
    BF16_TRUNCATION_GAIN,
    rounds_alike=True,
)
FP8_HOPPER = kernels.bound(
    "hopper",
    f"{kernels.HOPPER.reason}, plus the computed effect of rounding these weighted results",
    kernels.TRUNCATION_GAIN,
    rounds_alike=True,
)

TOPK_SOFTMAX_CALL = "sgl_kernel.topk_softmax", "topk_weights topk_ids routing_logits norm_topk_prob"


def chosen_by_kernel(definition: Definition, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    logits = inputs["routing_logits"]
    shape = (logits.shape[0], definition.const_axes["top_k"])
    weights = torch.full(shape, math.nan, dtype=torch.float32, device=logits.device)
    ids = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    called(*TOPK_SOFTMAX_CALL, definition, {**inputs, "topk_weights": weights, "topk_ids": ids})
    return weights, ids


def run_pipeline(products: kernels.Products, definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    return kernels.run_experts(definition, inputs, outputs, *chosen_by_kernel(definition, inputs), products)


@functools.cache
def publish_settings() -> None:
    """Gives this process SGLang's default settings, once: its functions ask a running server for them."""
    from sglang.srt.runtime_context import get_context, get_parallel

    get_context().override_server_args().install()
    get_parallel().override_permanently(tp_group=None)


def run_triton_experts(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """The weighted sum of the local experts among the chosen ones. SGLang's Triton experts take [gate, up], where the
    Definitions have [up, gate]. Experts of other ranks are -1."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    publish_settings()
    weights, ids = chosen_by_kernel(definition, inputs)
    axes, first = definition.const_axes, inputs["gemm1_weights"]
    local = ids - int(inputs["local_expert_offset"])
    local = torch.where((local >= 0) & (local < axes["num_local_experts"]), local, -1).to(torch.int32)
    sizes = "num_experts= num_local_experts= hidden_size= intermediate_size_per_partition=intermediate_size top_k="
    config = called(MoeRunnerConfig, f"{sizes} inplace=False", definition, {})
    chosen = StandardTopKOutput(weights, local, inputs["routing_logits"])
    gate_up = first.roll(axes["intermediate_size"], dims=1)
    states = inputs["hidden_states"]
    return {"output": fused_moe.fused_experts(states, gate_up, inputs["gemm2_weights"], chosen, config)}


def run_fp8_trtllm_gen(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """Renormalize computes the softmax over the chosen logits, Default the softmax over all logits."""
    method = "Renormalize" if inputs["norm_topk_prob"] else "Default"
    return kernels.trtllm_gen(
        "n_group=None topk_group=None routed_scaling_factor=None", method, definition, inputs, outputs
    )


def run_grouped_topk(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """SGLang's function without its decorator torch.compile, for one group. It lists chosen experts in any order."""
    from sglang.srt.layers.moe.topk import grouped_topk_gpu

    logits = inputs["routing_logits"]
    top_k, norm = definition.const_axes["top_k"], bool(inputs["norm_topk_prob"])
    with torch.compiler.set_stance("force_eager"):
        weights, ids = grouped_topk_gpu(logits, logits, top_k, norm, num_expert_group=1, topk_group=1)
    order = weights.argsort(dim=1, descending=True)
    return {"topk_weights": weights.gather(1, order), "topk_ids": ids.gather(1, order)}


TOPK_SOFTMAX = (
    calling(*TOPK_SOFTMAX_CALL, limits=kernels.LAUNCHABLE, compare={"topk_weights": TOPK_WEIGHTS}),
    # SGLang's Triton router, without a bias.
    calling(
        "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
        "routing_logits None top_k 'softmax' renormalize=norm_topk_prob",
        "softmax",
        limits=kernels.LAUNCHABLE,
        compare={"topk_weights": TOPK_WEIGHTS},
    ),
    Kernel(
        f"{TOPK}.grouped_topk_gpu",
        run_grouped_topk,
        variant="eager, one group",
        limits=kernels.LAUNCHABLE,
        plan_options=SoftmaxOptions(exact=False),
        compare={"topk_weights": BF16_WEIGHTS},
    ),
)
BF16_KERNELS = (
    kernels.experts_kernel(
        "torch.nn.functional.grouped_mm",
        functools.partial(run_pipeline, kernels.bf16_products),
        BF16_HOPPER,
        "pipeline with sgl_kernel: topk_softmax, prepare_moe_input, shuffle_rows, silu_and_mul, shuffle_mul_sum",
    ),
    # It rounds where the pipeline does: both products, and silu * up; the weight is applied before.
    kernels.experts_kernel(
        f"{FUSED_EXPERTS}.fused_experts", run_triton_experts, BF16_HOPPER, "with sgl_kernel: topk_softmax"
    ),
)
FP8_KERNELS = (
    kernels.experts_kernel(
        kernels.GROUPED_PRODUCT,
        functools.partial(run_pipeline, kernels.fp8_products),
        FP8_HOPPER,
        "pipeline: topk_softmax, prepare_moe_input, shuffle_rows, silu_and_mul, group_quant, shuffle_mul_sum",
    ),
    kernels.experts_kernel(kernels.TRTLLM_FP8, run_fp8_trtllm_gen, kernels.BLACKWELL),
)

#: For the router alone. ``peaked``: a token's weights span many orders of magnitude; ``equal``: all logits are equal.
LOGITS = ("random", "peaked", "ties", "one_expert", "equal")
#: The smallest difference of neighboring logits, about 200 roundings of a float32 softmax; and the largest distance of
#: a chosen logit from the best, at which exp is still far above the smallest normal number, 2^-126.
GAP, REACH = 2.0**-16, 80.0
#: For a kernel that rounds probabilities to bf16: logits of this size, whose neighbors are at least BF16_GAP apart.
#: Probabilities of such logits differ by more than neighboring bf16 numbers, which are at most 2^-7 apart.
WIDE = {"wide": 4.0, "wide_peaked": 12.0}
BF16_GAP = 2.0**-6
#: The step of a corner: logits of FAINT_LEVELS times this are below 1e-5, and 64 roundings of a number below 1 apart:
#: more than those of a float32 exponential, its argument and its division by a sum together, which are the same for
#: equal logits.
FAINT, FAINT_LEVELS = 2.0**-18, 2
GAPS = {**dict.fromkeys(WIDE, BF16_GAP), "faint": FAINT / 2}


def decidable(logits: torch.Tensor, top_k: int, gap: float = GAP) -> torch.Tensor:
    """Rows whose chosen experts, and their order, a float32 softmax cannot change: each chosen logit equals the next
    smaller one or is above it by `gap`, wider for kernels that round more and choose any of equal ones."""
    ordered = logits.double().sort(dim=1, descending=True).values
    gaps = (ordered[:, :-1] - ordered[:, 1:])[:, :top_k]
    within = ordered[:, 0] - ordered[:, top_k - 1] < REACH
    tied = (gaps == 0) & (gap <= GAP)
    return (tied | (gaps > gap)).all(dim=1) & within


def draw_logits(definition: Definition, plan: Plan, draws: Draws) -> torch.Tensor:
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


def exact(request: PlanRequest) -> bool:
    return request.options_of(SoftmaxOptions).exact


def router_corners(request: PlanRequest) -> list[Plan]:
    """Logits beyond float16's range, and below 1e-5; not for kernels that choose any of equal ones, or round to
    bf16."""
    if not exact(request):
        return []
    last = {"rank": request.definition.const_axes["num_experts"] - 1, "norm": False}
    return [{**last, "routing": "beyond_float16"}, {**last, "routing": "faint"}]


ROUTER_PLAN = RowPlans(
    {"seq_len": Count(96, 2048)},
    {
        "routing": Drawn(lambda request: st.sampled_from(LOGITS if exact(request) else tuple(WIDE)), "random"),
        "rank": lambda request: range(request.definition.const_axes["num_experts"]),
        "norm": Drawn(lambda request: st.booleans() if exact(request) else st.just(False), True),
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
    """Experts with exactly one token; on a CPU, logits and hidden states beyond float16's range: bounds hold for what
    kernels round, but scales of blocks are numbers that they choose."""
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
    experts: Callable[[Definition, Plan, Draws], Inputs], definition: Definition, plan: Plan, draws: Draws
) -> Inputs:
    logits = draw_logits(definition, plan, draws)
    tensors, axes = experts(definition, plan, draws), definition.const_axes
    offset = plan["rank"] * axes["num_local_experts"]
    found = {"routing_logits": logits, **tensors, "local_expert_offset": offset, "norm_topk_prob": plan["norm"]}
    return spoil_unchosen(definition, plan, found, lambda: chosen_by_rank(logits.double(), axes["top_k"]))


def bf16_experts(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Weights like trained ones: products keep the magnitude of their inputs."""
    axes = definition.const_axes
    experts, hidden_size, size = axes["num_local_experts"], axes["hidden_size"], axes["intermediate_size"]
    return {
        "hidden_states": hidden_values(definition, plan, draws).to(torch.bfloat16),
        "gemm1_weights": draws.matrices([experts, 2 * size, hidden_size], torch.bfloat16, "normal", hidden_size**-0.5),
        "gemm2_weights": draws.matrices([experts, hidden_size, size], torch.bfloat16, "normal", size**-0.5),
    }


UNSORTED = (
    Family(
        name="moe_topk_softmax",
        op_type="moe",
        twin={"num_experts": 16},
        plan=ROUTER_PLAN,
        make_inputs=router_inputs,
        oracle=topk_softmax_oracle,
        compare={"topk_weights": TOPK_WEIGHTS_REFERENCE, "topk_ids": TOPK_IDS},
        kernels=TOPK_SOFTMAX,
    ),
    *(
        experts_family(
            f"moe_{name}_softmax_routing",
            twin,
            PLAN,
            functools.partial(expert_inputs, experts),
            functools.partial(experts_oracle, arithmetic, softmax_route),
            its_kernels,
        )
        for name, twin, experts, arithmetic, its_kernels in (
            ("bf16", TWIN, bf16_experts, BF16, BF16_KERNELS),
            ("fp8_block_scale", FP8_TWIN, fp8_experts, FP8_BLOCKS, FP8_KERNELS),
        )
    ),
)

GAMMAS = ErrorBound(
    lambda expected: topk_weights_bound(expected) + rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8),
    "one bf16 rounding, u = 2^-8, of a float32 softmax over the chosen logits: 2^-24 (2 (max - l) + 8 sqrt(top_k) + "
    "2 ln(top_k) + 24)",
)


def sorted_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Which experts each token chose, by counting ranks; rows by counting those of lower experts, and of tokens before.
    Parts of the weights: those of `topk_weights_bound`."""
    logits = inputs["routing_logits"].double()
    top_k = definition.const_axes["top_k"]
    chosen = ranks(logits) < top_k
    counts = chosen.sum(dim=0)
    rows = (counts.cumsum(0) - counts) + chosen.cumsum(dim=0) - 1
    positions = rows[chosen]
    own = logits[chosen].view(-1, top_k)
    largest = own.amax(dim=1, keepdim=True) if len(own) else own[:, :1]
    weights = (own - largest).exp()
    weights = weights / weights.sum(dim=1, keepdim=True)
    # A permutation is inverted by placing each number where it points to.
    pairs = torch.empty_like(positions).scatter_(0, positions, torch.arange(len(positions), device=logits.device))
    parts = {
        "distance": (largest - own).flatten()[pairs],
        "experts": torch.tensor(float(top_k), dtype=torch.float64, device=logits.device),
    }
    return {
        "gammas": Expected(weights.flatten()[pairs], parts),
        "expert_counts": Expected(counts),
        "row_pairs": Expected(pairs),
        "positions": Expected(positions.view(-1, top_k)),
    }


def run_routing(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    """As SGLang calls it for a model that normalizes the weights of the chosen experts. The kernel numbers pairs best
    first (up to sglang-kernel 0.4.2, by expert): the numbers are translated."""
    from triton_kernels.topk import topk

    top_k = definition.const_axes["top_k"]
    found = topk(inputs["routing_logits"], top_k, apply_softmax=True)
    order, metadata = found.indx.argsort(dim=1), found.mask_metadata
    pairs = metadata.col_sorted_indx
    choice = order.argsort(dim=1).flatten()[pairs]
    return {
        "gammas": found.vals.flatten()[pairs],
        "expert_counts": metadata.col_sum,
        "row_pairs": (pairs // top_k * top_k + choice).to(torch.int32),
        "positions": metadata.row_sorted_indx.view(order.shape).gather(1, order),
    }


FAMILIES = (
    *UNSORTED,
    Family(
        name="moe_topk_softmax_sorted",
        op_type="moe",
        twin={"num_experts": 16, "top_k": 4},
        # More than 2048 rows of an expert, the most that are drawn on a GPU.
        plan=replace(ROUTER_PLAN, many_rows=9000),
        make_inputs=lambda definition, plan, draws: {"routing_logits": draw_logits(definition, plan, draws)},
        oracle=sorted_oracle,
        compare={
            "gammas": GAMMAS,
            "expert_counts": Exact("counts"),
            "row_pairs": Exact("pairs of an expert are in ascending order"),
            "positions": Exact("rows are numbered in the order of experts, and of pairs"),
        },
        kernels=(Kernel("triton_kernels.topk.topk", run_routing, limits=kernels.LAUNCHABLE),),
    ),
)
