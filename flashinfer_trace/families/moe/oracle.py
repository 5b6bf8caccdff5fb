"""The float64 oracles of the mixtures of experts: routing by counting ranks, not by sorting; `experts` does the rest.

The softmax is not computed as exponentials over their sum: 1 / sum over j of exp(l_j - l_i), over all experts or over
the chosen ones, is the same number computed in another way.
"""

from __future__ import annotations

import torch

from flashinfer_trace.families.moe.experts import BF16, FP8_BLOCKS, expert_outputs
from flashinfer_trace.families.quantized import chosen_by_rank, ranks
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.verdict.compare import Expected


def in_groups(scores: torch.Tensor, groups: int) -> torch.Tensor:
    """[rows, experts] -> [rows, groups, experts per group], also for zero rows."""
    return scores.view(scores.shape[0], groups, scores.shape[1] // groups)


def route(definition: Definition, inputs: Inputs) -> torch.Tensor:
    """DeepSeek routing: weights [seq_len, num_experts] in float64, zero where an expert is not chosen."""
    axes = definition.const_axes
    scores = torch.sigmoid(inputs["routing_logits"].double())
    choice = in_groups(scores + inputs["routing_bias"].double(), axes["n_group"])
    group_scores = torch.where(chosen_by_rank(choice, 2), choice, 0.0).sum(dim=2)
    kept = chosen_by_rank(group_scores, axes["topk_group"]).unsqueeze(2)
    candidates = torch.where(kept, choice, -torch.inf).flatten(1)
    chosen = torch.where(chosen_by_rank(candidates, axes["top_k"]), scores, 0.0)
    return chosen / chosen.sum(dim=1, keepdim=True) * float(inputs["routed_scaling_factor"])


def softmax_route(definition: Definition, inputs: Inputs) -> torch.Tensor:
    """Softmax routing: weights [seq_len, num_experts] in float64, zero where an expert is not chosen."""
    logits = inputs["routing_logits"].double()
    chosen = chosen_by_rank(logits, definition.const_axes["top_k"])
    counted = torch.where(chosen, logits, -torch.inf) if inputs["norm_topk_prob"] else logits
    return chosen / torch.exp(counted.unsqueeze(1) - logits.unsqueeze(2)).sum(dim=2)


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """DeepSeek routing, fp8 blocks."""
    return expert_outputs(FP8_BLOCKS, definition, inputs, route(definition, inputs))


def fp8_softmax_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Softmax routing, fp8 blocks."""
    return expert_outputs(FP8_BLOCKS, definition, inputs, softmax_route(definition, inputs))


def bf16_softmax_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Softmax routing, bfloat16."""
    return expert_outputs(BF16, definition, inputs, softmax_route(definition, inputs))


def topk_softmax_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The router alone; ``distance`` is how far a chosen logit is below the best, ``experts`` their number."""
    logits = inputs["routing_logits"].double()
    top_k = definition.const_axes["top_k"]
    order = torch.empty_like(logits, dtype=torch.int64)
    order.scatter_(1, ranks(logits), torch.arange(logits.shape[1], device=logits.device).expand_as(order))
    ids = order[:, :top_k]
    weights = softmax_route(definition, inputs).gather(1, ids)
    distance = (logits.gather(1, ids[:, :1]) - logits.gather(1, ids)).abs()
    experts = torch.tensor(float(logits.shape[1]), dtype=torch.float64, device=logits.device)
    return {
        "topk_weights": Expected(weights, {"distance": distance, "experts": experts}),
        "topk_ids": Expected(ids),
    }
