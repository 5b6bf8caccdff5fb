"""The router of a mixture of experts: softmax over the experts' logits, then the TOP_K best experts of each token.

Experts are chosen by their logits (the softmax keeps their order) and listed best first; of equal logits, the lower
index comes first. The weight of a chosen expert is its softmax probability over all experts. norm_topk_prob divides it
by the sum over the chosen experts, which gives the softmax over the chosen experts alone. Computed in float64 and
rounded once. Logits are finite. A kernel that computes the softmax in float32 cannot tell apart experts whose logits
differ by less than its rounding errors, or lie more than about 87 below the best.
"""

import torch

from ._shared import softmax_route

NUM_EXPERTS = 8
TOP_K = 2


def run(routing_logits: torch.Tensor, norm_topk_prob: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (routing_logits.shape[0], NUM_EXPERTS)
    experts, weights = softmax_route(routing_logits, TOP_K, bool(norm_topk_prob))
    return weights.to(torch.float32), experts.to(torch.int32)
