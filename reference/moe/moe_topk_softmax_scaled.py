"""Gemma-4's expert router: the TOP_K best experts of each token, a softmax over these, and a scale of each expert.

Experts are chosen by their logits and listed best first; of equal logits, the lower index comes first. The weight of a
chosen expert is the softmax over the chosen logits, times the expert's scale. Computed in float64 and rounded once.
Logits are finite.
"""

import torch

NUM_EXPERTS = 128
TOP_K = 8


def run(routing_logits: torch.Tensor, per_expert_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (routing_logits.shape[0], NUM_EXPERTS)
    assert per_expert_scale.shape == (NUM_EXPERTS,)
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    experts = routing_logits.argsort(dim=1, descending=True, stable=True)[:, :TOP_K]
    weights = torch.softmax(routing_logits.double().gather(1, experts), dim=1)
    return (weights * per_expert_scale[experts]).to(torch.float32), experts.to(torch.int32)
