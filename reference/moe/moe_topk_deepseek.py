"""DeepSeek-V3's expert router (without auxiliary loss): grouped top-k of sigmoid scores with a bias.

The scores s = sigmoid(logits) choose experts with a bias and weigh them without it. The score of a group is the sum of
its two largest s + bias. The best TOPK_GROUP of the N_GROUP groups are kept, and among their experts the TOP_K with the
largest s + bias are chosen and listed in that order. Of equal values, the lower index comes first, for groups and for
experts. The weight of a chosen expert is s / (sum of the chosen s) * routed_scaling_factor; a caller that scales the
result of the experts instead passes 1.

Computed in float64 and rounded once. Logits are finite. A kernel that computes in float32 cannot tell apart experts
whose s + bias differ by less than its rounding errors. Nothing is added to the sum, so weights of a token whose chosen
scores are all zero in float32 (logits below about -88) are undefined in kernels.
"""

import torch

from ._shared import deepseek_route

NUM_EXPERTS = 256
N_GROUP = 8
TOPK_GROUP = 4
TOP_K = 8


def run(
    routing_logits: torch.Tensor, routing_bias: torch.Tensor, routed_scaling_factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (routing_logits.shape[0], NUM_EXPERTS)
    assert routing_bias.shape == (NUM_EXPERTS,)
    experts, scores = deepseek_route(routing_logits, routing_bias, N_GROUP, TOPK_GROUP, TOP_K)
    weights = scores / scores.sum(dim=1, keepdim=True) * routed_scaling_factor
    return weights.to(torch.float32), experts.to(torch.int32)
