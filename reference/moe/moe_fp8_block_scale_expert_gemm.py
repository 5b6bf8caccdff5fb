"""One product of the experts of a mixture of experts, in fp8 (e4m3), for the experts that each token chose.

output[t, j] = q(hidden_states[t, j]) weights[topk_ids[t, j]]', optionally multiplied by topk_weights[t, j]. With
ROWS_PER_TOKEN = 1, all choices of a token have the same row (the first product: gate and up). With ROWS_PER_TOKEN =
TOP_K, each choice has its own (the second product: down). Choices of experts on other ranks (id -1) give zeros.

Weights have one scale for each BLOCK x BLOCK codes. q rounds each BLOCK consecutive features of a row to e4m3, with
their largest magnitude / 448 as the scale; it is part of the operation, because fp8 products need fp8 operands. Where
x / scale lies halfway between two codes, kernels may choose the other one. Products and the routing weight are computed
in float32 and rounded once.
"""

import torch

from ._shared import dequantize, quantized_groups, tokens_of_experts

NUM_EXPERTS = 32
TOP_K = 8
ROWS_PER_TOKEN = 1
N = 4096
K = 7168
NUM_N_BLOCKS = 32
NUM_K_BLOCKS = 56
BLOCK = 128


def run(
    hidden_states: torch.Tensor,
    weights: torch.Tensor,
    weights_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mul_routed_weight: bool,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, top_k, n] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert hidden_states.shape == (seq_len, ROWS_PER_TOKEN, K)
    assert weights.shape == (NUM_EXPERTS, N, K)
    assert weights_scale.shape == (NUM_EXPERTS, NUM_N_BLOCKS, NUM_K_BLOCKS)
    assert topk_weights.shape == (seq_len, TOP_K)
    assert topk_ids.shape == (seq_len, TOP_K)
    rows = quantized_groups(hidden_states, BLOCK).expand(seq_len, TOP_K, K)
    output = rows.new_zeros(seq_len, TOP_K, N)
    # One expert at a time, and only those that received a token: all of them in float32 would take up to 4 GB.
    for expert, token, slot in tokens_of_experts(topk_ids, NUM_EXPERTS):
        own = dequantize(weights[expert], weights_scale[expert], BLOCK)
        output[token, slot] = rows[token, slot] @ own.T
    if mul_routed_weight:
        output = output * topk_weights.unsqueeze(2)
    return output.to(torch.bfloat16)
