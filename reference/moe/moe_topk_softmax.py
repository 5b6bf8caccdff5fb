"""The router of a mixture of experts: softmax over the experts' logits, then the TOP_K best experts of each token.

Experts are chosen by their logits (the softmax keeps their order) and listed best first. Equal logits: the lower index
first. The weight of a chosen expert is its softmax over all experts; norm_topk_prob divides by the sum of the chosen
ones, which is the softmax over the chosen alone. Computed in float64, rounded once. Logits are finite; a kernel whose
softmax is float32 cannot tell experts apart whose logits are closer than its roundings, or about 87 below the best.
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
