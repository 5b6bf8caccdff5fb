"""DeepSeek-V4's hash routing: a table gives the experts of each token of the vocabulary, the logits only their weights.

The experts of a token are its row of token_experts, in that order. Their weights are the scores sqrt(log(1 + exp(l)))
of their logits l, divided by the sum of these scores. Computed in float64 and rounded once. Logits are finite. Nothing
is added to the sum; kernels add 1e-20, which shows where all scores of a token are below about 1e-13.
"""

import torch

NUM_EXPERTS = 256
TOP_K = 6
VOCAB_SIZE = 129280


def run(
    routing_logits: torch.Tensor, input_ids: torch.Tensor, token_experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """routing_logits [seq_len, num_experts] -> topk_weights float32 and topk_ids int32, both [seq_len, top_k]."""
    assert routing_logits.shape == (len(input_ids), NUM_EXPERTS)
    assert token_experts.shape == (VOCAB_SIZE, TOP_K)
    experts = token_experts[input_ids]
    logits = routing_logits.double().gather(1, experts.long())
    scores = (logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs()))).sqrt()
    return (scores / scores.sum(dim=1, keepdim=True)).to(torch.float32), experts
