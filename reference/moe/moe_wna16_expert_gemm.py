"""One product of the experts of a mixture of experts, of bfloat16 activations and 4-bit weights in GPTQ's format.

output[t, j] = hidden_states[t, j] W[topk_ids[t, j]], optionally multiplied by topk_weights[t, j]. With ROWS_PER_TOKEN =
1, all choices of a token have the same row (the first product: gate and up). With ROWS_PER_TOKEN = TOP_K, each choice
has its own (the second product: down). Choices of experts on other ranks (id -1) give zeros.

qweight[e, i] has input features 8 i to 8 i + 7 of each output feature, the first in the lowest four bits of an int32. A
number q of 0..15 stands for (q - 8) times the scale of its group of GROUP_SIZE input features and its output feature.
Products and the routing weight are computed in float32 and rounded once.
"""

import torch

from ._shared import tokens_of_experts

NUM_EXPERTS = 128
TOP_K = 8
ROWS_PER_TOKEN = 1
N = 1536
K = 2048
K_PACKED = 256
GROUP_SIZE = 128
NUM_GROUPS = 16


def dequantized(qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Weights of one expert, int32 [k_packed, n], and scales [num_groups, n] -> float32 [k, n]."""
    shifts = 4 * torch.arange(8, device=qweight.device)[:, None]
    numbers = (qweight[:, None] >> shifts) & 15
    return ((numbers.view(NUM_GROUPS, GROUP_SIZE, N) - 8) * scales.float()[:, None]).flatten(0, 1)


def run(
    hidden_states: torch.Tensor,
    qweight: torch.Tensor,
    scales: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mul_routed_weight: bool,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, top_k, n] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert hidden_states.shape == (seq_len, ROWS_PER_TOKEN, K)
    assert qweight.shape == (NUM_EXPERTS, K_PACKED, N)
    assert scales.shape == (NUM_EXPERTS, NUM_GROUPS, N)
    assert topk_weights.shape == (seq_len, TOP_K)
    assert topk_ids.shape == (seq_len, TOP_K)
    rows = hidden_states.float().expand(seq_len, TOP_K, K)
    output = rows.new_zeros(seq_len, TOP_K, N)
    # One expert at a time, and only those that received a token: all of them in float32 would take up to 4 GB.
    for expert, token, slot in tokens_of_experts(topk_ids, NUM_EXPERTS):
        output[token, slot] = rows[token, slot] @ dequantized(qweight[expert], scales[expert])
    if mul_routed_weight:
        output = output * topk_weights.unsqueeze(2)
    return output.to(torch.bfloat16)
