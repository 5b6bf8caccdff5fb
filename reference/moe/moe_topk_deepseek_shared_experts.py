"""DeepSeek-V3's expert router with shared experts appended to every token's choice.

The first TOP_K - NUM_FUSED_SHARED_EXPERTS columns are those of DeepSeek-V3's router: the scores s = sigmoid(logits)
choose experts with a bias and weigh them without it. The score of a group is the sum of its two largest s + bias. The
best TOPK_GROUP of the N_GROUP groups are kept, and among their experts those with the largest s + bias are chosen and
listed in that order. Of equal values, the lower index comes first. Their weights are s / (sum of the chosen s).

The last columns are the shared experts NUM_EXPERTS, NUM_EXPERTS + 1, ..., which every token uses. Their weight is
1 / routed_scaling_factor: it cancels the factor by which the result of all experts is multiplied later. With
apply_routed_scaling_factor_on_output, all weights are multiplied by the factor here.

Computed in float64 and rounded once. Logits are finite, and their scores do not vanish in float32.
"""

import torch

from ._shared import deepseek_route

NUM_EXPERTS = 256
N_GROUP = 8
TOPK_GROUP = 4
TOP_K = 9
NUM_FUSED_SHARED_EXPERTS = 1


def run(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    routed_scaling_factor: float,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (routing_logits.shape[0], NUM_EXPERTS)
    assert routing_bias.shape == (NUM_EXPERTS,)
    experts, scores = deepseek_route(
        routing_logits, routing_bias, N_GROUP, TOPK_GROUP, TOP_K - NUM_FUSED_SHARED_EXPERTS
    )
    shared = torch.arange(NUM_EXPERTS, NUM_EXPERTS + NUM_FUSED_SHARED_EXPERTS, device=experts.device)
    ids = torch.cat([experts, shared.expand(len(experts), NUM_FUSED_SHARED_EXPERTS)], dim=1)
    routed = scores / scores.sum(dim=1, keepdim=True)
    own = routed.new_ones(len(experts), NUM_FUSED_SHARED_EXPERTS) / routed_scaling_factor
    weights = torch.cat([routed, own], dim=1)
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights.to(torch.float32), ids.to(torch.int32)
