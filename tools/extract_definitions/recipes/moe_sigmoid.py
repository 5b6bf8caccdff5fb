"""Mixtures of experts as DeepSeek-V3 routes them: sigmoid scores, a bias, groups; the router, and fp8 experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes import experts as routed
from tools.extract_definitions.recipes.fields import HEADS, ROUTING, WIDTHS
from tools.extract_definitions.recipes.unread import of_experts, reported
from tools.extract_definitions.words import const, document, models, plural, tensor, var

EXPERT_PARALLEL = (8,)
ROUTER, FAMILY = "moe_topk_deepseek", "moe_fp8_block_scale_ds_routing"
GATES = frozenset({"flashinfer:fused_topk_deepseek", "sgl-kernel:kimi_k2_moe_fused_gate", "sgl-kernel:moe_fused_gate"})
KERNELS = frozenset({"sgl-kernel:moe_fused_gate", *routed.BLOCK_SCALED})
#: The most experts that the routers of one group take, and the most that they choose.
MAX_EXPERTS, MAX_CHOSEN = 512, 8
#: The most experts per group that sgl_kernel.moe_fused_gate takes; the number of all experts must be a power of two.
MAX_GROUP = 32
TAGS = (
    "quantization:float8_e4m3fn",
    "quantization:fp8_block_scale",
    "routing:deepseek-v3",
    "fused",
)


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    experts = model.experts
    if experts is None or routed.scoring(request) != "sigmoid":
        return
    if model.config.get("norm_topk_prob") not in (None, True):
        text = "no family covers sigmoid routing whose weights are not divided by their sum (norm_topk_prob false)"
        routed.not_covered(request, text)
        return
    if lacking := [field for field in ("n_group", "topk_group") if field not in model]:
        routed.not_covered(request, f"the code needs the field {lacking[0]}, which the configuration does not give")
        return
    router = {"num_experts": experts, **_routing(model)}
    stages = routed.router_stages(request, GATES)
    if experts > MAX_EXPERTS or router["top_k"] > MAX_CHOSEN:
        request.uncovered[routed.TOPK] = (
            f"the kernels of {ROUTER} take at most {MAX_EXPERTS} experts and choose at most {MAX_CHOSEN}, "
            f"not {router['top_k']} of {experts}"
        )
    elif stages:
        yield Need(ROUTER, router, Use(model, routed.TOPK), stages)
    if reported(request, routed.OPS, of_experts(request) or _not_covered(request, experts)):
        return
    for op in (*routed.OPS, routed.TOPK):
        for size in request.options.expert_parallel or EXPERT_PARALLEL:
            stages = request.stages(op, KERNELS)
            if not stages or not routed.divides(request, experts, size):
                continue
            axes = {
                "num_experts": experts,
                "num_local_experts": experts // size,
                **_routing(model),
                "hidden_size": model.size("hidden_size"),
                "intermediate_size": model.expert_size,
            }
            yield Need(FAMILY, axes, Use(model, op, ep=size), stages)


def _not_covered(request: Request, experts: int) -> str:
    """Why the family does not cover the experts; "" if it does."""
    if True not in routed.block_scaled(request):
        return "extraction derives no experts of sigmoid routing without fp8 block scales"
    if not request.options.quantized:
        return "its experts are quantised (--include-quantized)"
    if request.options.splits_each_expert:
        return "extraction derives no experts of sigmoid routing whose features are split over ranks"
    groups = request.model.size("n_group")
    if experts & (experts - 1) or experts > MAX_GROUP * groups:
        most = f"powers of two, at most {MAX_GROUP} per group"
        return f"the family's router takes {most}, not {experts} experts in {plural(groups, 'group')}"
    return ""


def _routing(model: Model) -> dict[str, int]:
    """How experts are chosen.

    Raises:
        ExtractionError: the groups do not divide the experts, or there are fewer than routing chooses.
    """
    groups, chosen = model.size("n_group"), model.size("topk_group")
    if (model.experts or 0) % groups:
        raise ExtractionError(f"{model.path}: n_group {groups} does not divide {model.experts} experts; correct it")
    if chosen > groups:
        raise ExtractionError(f"{model.path}: topk_group {chosen} exceeds n_group {groups}; correct one of them")
    return {"top_k": model.chosen_experts, "n_group": groups, "topk_group": chosen}


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    experts, local, top_k = axes["num_experts"], axes.get("num_local_experts", 1), axes["top_k"]
    groups = (
        f"{axes['topk_group']} of {axes['n_group']} groups, {top_k} experts per token"
        if axes["n_group"] > 1
        else f"{top_k} experts per token"
    )
    if family == ROUTER:
        return _router(axes, needs, groups)
    description = (
        f"One rank's share of the routed experts of {models(needs)} under expert parallelism over "
        f"{experts // local} ranks: routing over all {experts} experts (sigmoid scores, a bias for the choice only, "
        f"{groups}), "
        f"then the SwiGLU MLPs of the {local} local experts, in fp8 with 128x128 weight scales and 1x128 "
        "activation scales. The outputs of the ranks add up to that of the layer. The shared expert is not included."
    )
    routing = {
        "top_k": const(top_k, "Experts chosen per token."),
        "n_group": const(axes["n_group"], "Groups of consecutive experts, which routing compares first."),
        "topk_group": const(
            axes["topk_group"], "Groups kept after that comparison; experts of other groups are not chosen."
        ),
    }
    dimensions = routed.layer_axes(f"{routed.TOKENS}, {routed.GATHERED}", axes, routing, block_scaled=True)
    constraints = routed.constraints("num_experts % n_group == 0", block_scaled=True)
    return document(description, needs, TAGS, dimensions, _inputs(), routed.OUTPUTS, constraints)


def _router(axes: Mapping[str, int], needs: Sequence[Need], groups: str) -> dict[str, Any]:
    """The router alone; `groups` says how experts are chosen."""
    description = (
        f"Expert router of {models(needs)}: sigmoid scores of {axes['num_experts']} experts with a bias for the choice "
        f"only, {groups}, and their weights."
    )
    dimensions = {
        "seq_len": var(f"{routed.TOKENS}."),
        "num_experts": const(axes["num_experts"], "Routed experts of the layer, on all ranks."),
        "n_group": const(axes["n_group"], "Groups of experts."),
        "topk_group": const(axes["topk_group"], "Groups whose experts may be chosen."),
        "top_k": const(axes["top_k"], "Experts chosen per token."),
    }
    logits = "Output of the router for each token and expert, before the sigmoid."
    bias = "Added to the scores where experts are chosen (e_score_correction_bias); not part of the weights."
    factor = (
        "Factor of all weights (routed_scaling_factor of the model's configuration, or 1 where the result of the "
        "experts is scaled instead)."
    )
    inputs = {
        "routing_logits": tensor(["seq_len", "num_experts"], "float32", logits),
        "routing_bias": tensor(["num_experts"], "float32", bias),
        "routed_scaling_factor": tensor(None, "float32", factor),
    }
    pair = ["seq_len", "top_k"]
    ids = "Indices of the chosen experts, best first; of equal values, the lower index comes first."
    outputs = {
        "topk_weights": tensor(
            pair,
            "float32",
            "Scores of the chosen experts without the bias, divided by their sum, times the factor.",
        ),
        "topk_ids": tensor(pair, "int32", ids),
    }
    constraints = ("top_k <= num_experts", "topk_group <= n_group", "num_experts % n_group == 0")
    return document(description, needs, ("routing:deepseek-v3", "fused"), dimensions, inputs, outputs, constraints)


def _inputs() -> dict[str, Any]:
    logits = "Router output for each token and expert, before the sigmoid."
    bias = "Added to the sigmoid scores to choose experts (e_score_correction_bias); the weights do not include it."
    factor = "Factor applied to the normalised weights of the chosen experts (2.5 in DeepSeek-V3/R1)."
    return {
        "routing_logits": tensor(["seq_len", "num_experts"], "float32", logits),
        "routing_bias": tensor(["num_experts"], "bfloat16", bias),
        **routed.operands(block_scaled=True),
        "routed_scaling_factor": tensor(None, "float32", factor),
    }


FIELDS = HEADS | ROUTING | WIDTHS | {"hidden_size"}
RECIPE = Recipe("moe", (ROUTER, FAMILY), KERNELS | GATES, FIELDS, needs, describe)
