"""DeepSeek-V4's expert router: the TOP_K best experts of each token, by the square root of softplus.

The scores s = sqrt(log(1 + exp(logits))) choose experts with a bias and weigh them without it: the TOP_K experts with
the largest s + bias are listed, best first; of equal values, the lower index comes first. The weight of a chosen expert
is s, divided by the sum over the chosen experts if norm_topk_prob, times routed_scaling_factor.

Computed in float64 and rounded once. Logits are finite. A kernel that computes in float32 cannot tell apart experts
whose s + bias differ by less than its rounding errors.
"""

import torch

NUM_EXPERTS = 256
TOP_K = 6


def run(
    routing_logits: torch.Tensor, routing_bias: torch.Tensor, routed_scaling_factor: float, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (routing_logits.shape[0], NUM_EXPERTS)
    assert routing_bias.shape == (NUM_EXPERTS,)
    logits = routing_logits.double()
    scores = torch.sqrt(logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs())))
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    experts = (scores + routing_bias).argsort(descending=True, stable=True)[:, :TOP_K]
    weights = scores.gather(1, experts)
    if norm_topk_prob:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return (weights * routed_scaling_factor).to(torch.float32), experts.to(torch.int32)
