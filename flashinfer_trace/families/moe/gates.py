"""The routers of newer models: scores of sqrt(softplus), experts from a table of tokens, and a scale of each expert."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashinfer_trace.families.moe import gating, softmax
from flashinfer_trace.families.moe.gating import FLOAT32, IDS, REFERENCE, U32
from flashinfer_trace.families.moe.inputs import clear_rows
from flashinfer_trace.families.moe.kernels import LAUNCHABLE
from flashinfer_trace.families.moe.oracle import ranked
from flashinfer_trace.families.moe.softmax import SINGLE_ROUNDINGS, TOPK_IDS
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Count, RowPlans
from flashinfer_trace.verdict.compare import CONFIDENCE, ErrorBound, Exact, Expected
from flashinfer_trace.verdict.copies import SameBits

#: Beside `gating.GAP`: each of two scores may be off by 8 u.
SCORE_GAP = 2.0**-20
#: Logits of the tokens that a table routes: ``faint`` scores are near 1e-5, and far above the 1e-20 of kernels.
HASHED_LOGITS = {"normal": (1.0, 0.0), "peaked": (8.0, 0.0), "large": (1e4, 0.0), "faint": (1.0, -22.0)}
#: Scales of experts, as factors of numbers from 0.5 to 2.
SCALES = {"usual": 1.0, "large": 1e5, "negative": -1.0}


def softplus_scores(logits: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()


def softplus_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Logits and a bias whose choice float32 cannot change: neighbors are equal, or farther apart than their errors."""
    for _ in range(gating.ATTEMPTS):
        bias, logits = gating.draw_bias(definition, plan, draws), gating.draw_logits(definition, plan, draws)
        exact = logits.double()
        scores = torch.sqrt(exact.clamp_min(0) + torch.log(1 + torch.exp(-exact.abs())))
        ordered = (scores + bias).sort(dim=1, descending=True).values[:, : definition.const_axes["top_k"] + 1]
        gaps = ordered[:, :-1] - ordered[:, 1:]
        smallest = gating.GAP * (1 + bias.abs().max()) + SCORE_GAP * scores.amax(dim=1, keepdim=True)
        clear = ((gaps == 0) | (gaps > smallest)).all(dim=1)
        if clear.any():
            break
    return {
        "routing_logits": clear_rows(logits, clear, plan["seq_len"]),
        "routing_bias": bias,
        "routed_scaling_factor": plan["factor"],
        "norm_topk_prob": plan["flag"],
    }


def weighted(logits: torch.Tensor, ids: torch.Tensor, divided: bool = True, factor: float = 1.0) -> dict[str, Expected]:
    """Chosen experts and their weights. ``reach``: how far below 0 the smallest of a token's chosen logits is."""
    own = logits.gather(1, ids)
    scores = softplus_scores(own)
    weights = scores / scores.sum(dim=1, keepdim=True) if divided else scores
    reach = (-own).clamp_min(0).amax(dim=1, keepdim=True)
    return {"topk_weights": Expected(weights * factor, {"reach": reach}), "topk_ids": Expected(ids)}


def softplus_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    logits = inputs["routing_logits"].double()
    ids = ranked(softplus_scores(logits) + inputs["routing_bias"].double(), definition.const_axes["top_k"])
    return weighted(logits, ids, bool(inputs["norm_topk_prob"]), float(inputs["routed_scaling_factor"]))


def hash_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    axes, count = definition.const_axes, plan["seq_len"]
    scale, shift = HASHED_LOGITS[plan["logits"]]
    first, step = draws.integers([axes["vocab_size"], 1], 0, axes["num_experts"] - 1), torch.arange(axes["top_k"])
    table = (first + step.to(first.device) * (axes["num_experts"] // axes["top_k"])) % axes["num_experts"]
    logits = draws.normal([count, axes["num_experts"]]) * scale + shift
    return {
        "routing_logits": logits.clamp_min(-gating.LOGIT_RANGE),
        "input_ids": draws.integers([count], 0, axes["vocab_size"] - 1),
        "token_experts": table.to(torch.int32),
    }


def hash_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    ids = torch.index_select(inputs["token_experts"].long(), 0, inputs["input_ids"])
    return weighted(inputs["routing_logits"].double(), ids)


def scaled_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    scale = draws.uniform([definition.const_axes["num_experts"]], 0.5, 2) * SCALES[plan["scale"]]
    return {
        "routing_logits": softmax.draw_logits(definition, plan, draws),
        "per_expert_scale": scale.to(torch.bfloat16),
    }


def scaled_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Parts of the weights: ``distance``, how far a logit is below the best; ``scale``, of the expert."""
    logits, top_k = inputs["routing_logits"].double(), definition.const_axes["top_k"]
    ids = ranked(logits, top_k)
    distance = logits.gather(1, ids[:, :1]) - logits.gather(1, ids)
    shares = (-distance).exp()
    scale = inputs["per_expert_scale"].double()[ids]
    weights = shares / shares.sum(dim=1, keepdim=True) * scale
    return {"topk_weights": Expected(weights, {"distance": distance, "scale": scale.abs()}), "topk_ids": Expected(ids)}


def scaled_bound(expected: Expected) -> torch.Tensor:
    relative = (2 * expected.parts["distance"] + SINGLE_ROUNDINGS + CONFIDENCE * 8**0.5) * U32
    return expected.value.abs() * relative + torch.finfo(torch.float32).smallest_normal * expected.parts["scale"]


SCALED = ErrorBound(
    scaled_bound, "a float32 softmax of 8, u = 2^-24: 2 u (max - l) for the exponent, 8 sqrt(8) u for the sum, 24 u"
)


def append_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Choices in any order, and weights of any bits: they are copied."""
    axes, count = definition.const_axes, plan["seq_len"]
    routed = [count, axes["routed_top_k"]]
    return {
        "routed_ids": draws.integers(routed, 0, axes["num_experts"] - 1, torch.int32),
        "routed_weights": draws.values(routed, torch.float32, plan["weights"]),
        "shared_weights": draws.values([count, axes["num_fused_shared_experts"]], torch.float32, plan["weights"]),
    }


def append_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    axes, ids = definition.const_axes, inputs["routed_ids"].long()
    own = [torch.full_like(ids[:, 0], axes["num_experts"] + n) for n in range(axes["num_fused_shared_experts"])]
    columns = [*inputs["routed_weights"].unbind(1), *inputs["shared_weights"].unbind(1)]
    return {
        "topk_weights": Expected(torch.stack(columns, dim=1)),
        "topk_ids": Expected(torch.stack([*ids.unbind(1), *own], dim=1)),
    }


def run_append(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_append_shared_experts_with_weights

    axes = definition.const_axes
    shared = axes["num_fused_shared_experts"]
    ids, weights = fused_append_shared_experts_with_weights(*inputs.values(), shared, N=axes["num_experts"])
    return {"topk_weights": weights, "topk_ids": ids}


def last_expert(request: PlanRequest) -> list[Plan]:
    """Logits beyond float16's range, the largest for the last experts, and logits below 1e-5."""
    last = {"rank": request.definition.const_axes["num_experts"] - 1}
    return [{**last, "routing": "beyond_float16"}, {**last, "routing": "faint"}, {"scale": "negative"}]


SCALED_PLAN = replace(
    softmax.ROUTER_PLAN,
    choices={
        **{name: entry for name, entry in softmax.ROUTER_PLAN.choices.items() if name != "norm"},
        "scale": tuple(SCALES),
    },
    special=last_expert,
)
FAMILIES = (
    Family(
        name="moe_topk_sqrtsoftplus",
        op_type="moe",
        twin={"num_experts": 16, "top_k": 6},
        plan=gating.PLAN,
        make_inputs=softplus_inputs,
        oracle=softplus_oracle,
        compare={"topk_weights": REFERENCE, "topk_ids": IDS},
        kernels=(
            gating.router(
                "sglang.kernels.ops.moe.moe_fused_gate.moe_fused_gate",
                f"{gating.LOGITS_AND_BIAS} top_k scoring_func='sqrtsoftplus' renormalize=norm_topk_prob "
                "routed_scaling_factor= apply_routed_scaling_factor_on_output=True",
                FLOAT32,
                "sqrtsoftplus",
            ),
        ),
    ),
    Family(
        name="moe_topk_hash",
        op_type="moe",
        twin={"num_experts": 16, "top_k": 6, "vocab_size": 50},
        plan=RowPlans(
            {"seq_len": Count(96, 2048)},
            {"logits": tuple(HASHED_LOGITS)},
            special=[{"logits": kind} for kind in HASHED_LOGITS],
            many_rows=300,
        ),
        make_inputs=hash_inputs,
        oracle=hash_oracle,
        compare={"topk_weights": REFERENCE, "topk_ids": Exact("copied from the table")},
        kernels=(
            gating.router("sglang.kernels.ops.moe.dsv4.hash_topk", "routing_logits input_ids token_experts", FLOAT32),
        ),
    ),
    Family(
        name="moe_topk_softmax_scaled",
        op_type="moe",
        twin={"num_experts": 16},
        plan=SCALED_PLAN,
        make_inputs=scaled_inputs,
        oracle=scaled_oracle,
        compare={"topk_weights": REFERENCE, "topk_ids": TOPK_IDS},
        kernels=(
            gating.router(
                "sglang.kernels.ops.moe.gemma4_routing.gemma4_fused_routing",
                "routing_logits per_expert_scale top_k",
                SCALED,
            ),
        ),
    ),
    Family(
        name="moe_append_shared_experts",
        op_type="moe",
        twin={"num_experts": 16, "routed_top_k": 6, "num_fused_shared_experts": 2, "top_k": 8},
        plan=RowPlans(
            {"seq_len": Count(96, 2048)},
            {"weights": ("normal", "special")},
            special=[{"weights": "special"}],
            many_rows=300,
        ),
        make_inputs=append_inputs,
        oracle=append_oracle,
        compare={"topk_weights": SameBits(), "topk_ids": Exact("copies, and the indices of the shared experts")},
        kernels=(
            Kernel(
                "sglang.kernels.ops.moe.fused_moe_triton_kernels.fused_append_shared_experts_with_weights",
                run_append,
                limits=LAUNCHABLE,
            ),
        ),
    ),
)
