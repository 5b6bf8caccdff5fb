"""The router of a mixture of experts with sigmoid scores and a bias: the TOP_K best experts of each token.

The scores s = sigmoid(logits) choose experts with the bias and weigh them without it: the TOP_K experts with the
largest s + bias are listed, best first; of equal values, the lower index comes first. The weight of a chosen expert is
s, which norm_topk_prob divides by the sum over the chosen experts. This router has no groups or scaling factor.

Computed in float64 and rounded once. Logits are finite. A kernel that computes in float32 cannot tell apart experts
whose s + bias differ by less than its rounding errors, and one that recovers s as (s + bias) - bias loses bits of s.
"""

import torch

NUM_EXPERTS = 256
TOP_K = 8


def run(
    routing_logits: torch.Tensor, correction_bias: torch.Tensor, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (routing_logits.shape[0], NUM_EXPERTS)
    assert correction_bias.shape == (NUM_EXPERTS,)
    scores = torch.sigmoid(routing_logits.double())
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    experts = (scores + correction_bias).argsort(descending=True, stable=True)[:, :TOP_K]
    weights = scores.gather(1, experts)
    if norm_topk_prob:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights.to(torch.float32), experts.to(torch.int32)
