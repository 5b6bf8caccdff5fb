"""Mixtures of experts routed by a softmax over all experts: the router alone, and with the experts in bf16 or fp8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes import experts as routed
from tools.extract_definitions.recipes.fields import HEADS, ROUTING, WIDTHS
from tools.extract_definitions.recipes.unread import of_experts, reported
from tools.extract_definitions.words import const, document, listed, models, plural, tensor, var

TENSOR_PARALLEL, EXPERT_PARALLEL = (1, 8), (8,)
ROUTER, BF16, FP8 = "moe_topk_softmax", "moe_bf16_softmax_routing", "moe_fp8_block_scale_softmax_routing"
GATE, FUSED = "sgl-kernel:topk_softmax", "triton:fused_moe_kernel"
KERNELS = {BF16: frozenset({FUSED}), FP8: routed.BLOCK_SCALED}
TAGS = {
    ROUTER: ("fused",),
    BF16: ("fused",),
    FP8: ("quantization:float8_e4m3fn", "quantization:fp8_block_scale", "fused"),
}
LOGITS = tensor(
    ["seq_len", "num_experts"], "bfloat16", "Output of the router for each token and expert, before the softmax."
)
NORMALISE = tensor(
    None,
    "bool",
    "Whether the weights of the chosen experts are divided by their sum (norm_topk_prob of the model's configuration).",
)


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    experts = model.experts
    if experts is None or routed.scoring(request) != "softmax":
        return
    if reason := _grouped(model):
        routed.not_covered(request, reason)
        return
    routing = ("routing:renormalize" if _normalises(model) else "routing:softmax",)
    families = [
        FP8 if scaled else BF16 for scaled in routed.block_scaled(request) if request.options.quantized or not scaled
    ]
    router = {"num_experts": experts, "top_k": model.chosen_experts}
    for place in _places(request, experts):
        if stages := routed.router_stages(request, [GATE]):
            yield Need(ROUTER, router, replace(place, op=routed.TOPK), stages, routing)
        if reported(request, routed.OPS, of_experts(request)):
            continue
        width = model.expert_size
        if place.tp is not None and not request.divides(width, place.tp, "the width of an expert"):
            continue
        axes = {
            **router,
            "num_local_experts": experts // (place.ep or 1),
            "hidden_size": model.size("hidden_size"),
            "intermediate_size": width // (place.tp or 1),
        }
        for family in families:
            if family == FP8 and (axes["hidden_size"] % routed.BLOCK or axes["intermediate_size"] % routed.BLOCK):
                problem = f"blocks of {routed.BLOCK} features do not fit"
                request.left_out[f"{family} of {model.name}, TP {place.tp}: {problem}"] = None
                continue
            for op in routed.OPS:
                if stages := request.stages(op, KERNELS[family]):
                    yield Need(family, axes, replace(place, op=op), stages, routing)


def _grouped(model: Model) -> str:
    """Why softmax routing is more than the choice of the best experts; "" if it is that."""
    if model.count("n_group") > 1:
        return "no family covers softmax routing with groups of experts"
    if model.config.get("routed_scaling_factor", 1) != 1:
        return "no family covers softmax routing with a factor"
    return ""


def _places(request: Request, experts: int) -> Iterator[Use]:
    """One use for each way to split the experts over ranks."""
    ranks, splits_each = request.options.ranks, request.options.splits_each_expert
    if ranks is not None and splits_each and ranks[1] > 1:
        request.left_out[f"experts over EP {ranks[1]} whose features are split over TP {ranks[0]}"] = None
        return
    for size in request.tensor_parallel(TENSOR_PARALLEL) if ranks is None or ranks[1] == 1 else ():
        yield Use(request.model, routed.TOPK, tp=size)
    for size in () if splits_each or ranks == (1, 1) else request.options.expert_parallel or EXPERT_PARALLEL:
        if routed.divides(request, experts, size):
            yield Use(request.model, routed.TOPK, ep=size)


def _normalises(model: Model) -> bool:
    """Whether the chosen experts' weights are scaled to sum to 1: as configured, by default yes, as in Mixtral."""
    return model.config.get("norm_topk_prob") is not False


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    experts, top_k = axes["num_experts"], axes["top_k"]
    chosen = const(top_k, "Experts chosen per token.")
    weights = _weights(needs)
    if family == ROUTER:
        description = (
            f"Expert router of {models(needs)}: softmax over {experts} logits, the {top_k} best experts of "
            f"each token and their weights, {weights}."
        )
        dimensions = {
            "seq_len": var(f"{routed.TOKENS}."),
            "num_experts": const(experts, "Routed experts of the layer, on all ranks."),
            "top_k": chosen,
        }
        inputs = {"routing_logits": LOGITS, "norm_topk_prob": NORMALISE}
        pair = ["seq_len", "top_k"]
        outputs = {
            "topk_weights": tensor(pair, "float32", "Softmax weights of the chosen experts, largest first."),
            "topk_ids": tensor(
                pair,
                "int32",
                "Indices of the chosen experts, best first; of equal logits, the lower index comes first.",
            ),
        }
        return document(description, needs, TAGS[family], dimensions, inputs, outputs, ["top_k <= num_experts"])
    local, block_scaled = axes["num_local_experts"], family == FP8
    numbers = "fp8 with 128x128 weight scales and 1x128 activation scales" if block_scaled else "bfloat16"
    apart = any(need.use.model.count("shared_expert_intermediate_size") for need in needs)
    description = " ".join(
        [
            f"{_part(axes, needs)}: softmax routing over {experts} experts ({top_k} per token, weights {weights}),",
            f"then {_mlps(local, experts)}, in {numbers}.",
            *(["The outputs of the ranks add up to that of the layer."] if _is_split(needs) else []),
            *(["The shared expert is not included."] if apart else []),
        ]
    )
    tokens = f"{routed.TOKENS}, {routed.GATHERED}" if local < experts else routed.TOKENS
    shared = all((need.use.tp or 1) > 1 for need in needs)
    dimensions = routed.layer_axes(tokens, axes, {"top_k": chosen}, block_scaled, shared)
    constraints = routed.constraints("top_k <= num_experts", block_scaled)
    inputs = {"routing_logits": LOGITS, **routed.operands(block_scaled), "norm_topk_prob": NORMALISE}
    return document(description, needs, TAGS[family], dimensions, inputs, routed.OUTPUTS, constraints)


def _is_split(needs: Sequence[Need]) -> bool:
    return any((need.use.tp or need.use.ep or 1) > 1 for need in needs)


def _part(axes: Mapping[str, int], needs: Sequence[Need]) -> str:
    """Which experts of which models, and how they are split over ranks."""
    whole = f"he routed experts of {models(needs)}"
    tensor_parallel = sorted({need.use.tp for need in needs if need.use.tp})
    expert_parallel = sorted({need.use.ep for need in needs if need.use.ep})
    if not _is_split(needs):
        return f"T{whole} on a single GPU"
    claimed = all(need.claimed for need in needs)
    ways = dict.fromkeys(
        f"{kind} parallelism over {plural(size, 'rank') if claimed else 'several ranks'}"
        for kind, sizes in (("tensor", tensor_parallel), ("expert", expert_parallel))
        for size in sizes
    )
    split = ", which splits the intermediate features of each expert" if min(tensor_parallel, default=1) > 1 else ""
    return f"One rank's share of t{whole} under {listed(ways)}{split}"


def _mlps(local: int, experts: int) -> str:
    if local == experts:
        return "their SwiGLU MLPs"
    return "the SwiGLU MLP of the local expert" if local == 1 else f"the SwiGLU MLPs of the {local} local experts"


def _weights(needs: Sequence[Need]) -> str:
    normalised = {_normalises(need.use.model) for need in needs}
    if normalised == {True}:
        return "scaled to sum to 1"
    if normalised == {False}:
        return "taken from the softmax over all experts"
    return "scaled to sum to 1 if norm_topk_prob is set"


KERNEL_NAMES = frozenset({GATE, FUSED, *routed.BLOCK_SCALED})
FIELDS = HEADS | ROUTING | WIDTHS | {"hidden_size"}
RECIPE = Recipe("moe", (ROUTER, BF16, FP8), KERNEL_NAMES, FIELDS, needs, describe)
