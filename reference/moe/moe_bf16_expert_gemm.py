"""One product of the experts of a mixture of experts, in bfloat16, for the experts that each token chose.

output[t, j] = hidden_states[t, j] weights[topk_ids[t, j]]', optionally multiplied by topk_weights[t, j]. With
ROWS_PER_TOKEN = 1, all choices of a token have the same row (the first product: gate and up). With ROWS_PER_TOKEN =
TOP_K, each choice has its own (the second product: down). Choices of experts on other ranks (id -1) give zeros.

Products and the routing weight are computed in float32 and rounded once.
"""

import torch

from ._shared import tokens_of_experts

NUM_EXPERTS = 32
TOP_K = 8
ROWS_PER_TOKEN = 1
N = 4096
K = 7168


def run(
    hidden_states: torch.Tensor,
    weights: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mul_routed_weight: bool,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, top_k, n] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert hidden_states.shape == (seq_len, ROWS_PER_TOKEN, K)
    assert weights.shape == (NUM_EXPERTS, N, K)
    assert topk_weights.shape == (seq_len, TOP_K)
    assert topk_ids.shape == (seq_len, TOP_K)
    rows = hidden_states.float().expand(seq_len, TOP_K, K)
    output = rows.new_zeros(seq_len, TOP_K, N)
    # One expert at a time, and only those that received a token: all of them in float32 would take up to 4 GB.
    for expert, token, slot in tokens_of_experts(topk_ids, NUM_EXPERTS):
        output[token, slot] = rows[token, slot] @ weights[expert].float().T
    if mul_routed_weight:
        output = output * topk_weights.unsqueeze(2)
    return output.to(torch.bfloat16)
