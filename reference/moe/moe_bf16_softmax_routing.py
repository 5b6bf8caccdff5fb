"""The experts of one rank in a mixture of experts with softmax routing, in bfloat16.

Routing chooses the TOP_K experts with the largest logits; of equal logits, the lower index comes first. The weight of a
chosen expert is its softmax probability over all experts. With norm_topk_prob (Mixtral, Qwen3), the weights of a token
are divided by their sum; without it (Qwen2-57B), they add up to less than 1.

Each expert is a SwiGLU MLP: (silu(x W_gate') * (x W_up')) W_2'. The first half of gemm1's rows is the up projection,
the second half the gate. Only the experts local_expert_offset .. local_expert_offset + NUM_LOCAL_EXPERTS - 1 are on
this rank. Experts on other ranks contribute nothing, so a token that chose none of these gives zeros. Under tensor
parallelism, INTERMEDIATE_SIZE is the share of this rank, and the outputs of the ranks add up.

All arithmetic is in float32: nothing is rounded between the products, and the sum over the experts is rounded once.
Kernels that keep the first product, the activation or the result of each expert in bfloat16 differ by those roundings.
"""

import torch

from ._shared import softmax_route, swiglu_mlp, tokens_of_experts

NUM_EXPERTS = 8
NUM_LOCAL_EXPERTS = 8
TOP_K = 2
HIDDEN_SIZE = 4096
INTERMEDIATE_SIZE = 14336
GEMM1_OUT_SIZE = 28672


def run(
    routing_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    local_expert_offset: int,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, hidden_size] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert routing_logits.shape == (seq_len, NUM_EXPERTS)
    assert hidden_states.shape == (seq_len, HIDDEN_SIZE)
    assert gemm1_weights.shape == (NUM_LOCAL_EXPERTS, GEMM1_OUT_SIZE, HIDDEN_SIZE)
    assert gemm2_weights.shape == (NUM_LOCAL_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
    experts, weights = softmax_route(routing_logits, TOP_K, bool(norm_topk_prob))
    local = experts - int(local_expert_offset)
    weights = weights.float()
    x = hidden_states.float()
    output = torch.zeros_like(x)
    # One expert at a time, and only those that received a token: all of them in float32 would take up to 10 GB.
    for expert, token, slot in tokens_of_experts(local, NUM_LOCAL_EXPERTS):
        result = swiglu_mlp(x[token], gemm1_weights[expert].float(), gemm2_weights[expert].float())
        output.index_add_(0, token, result * weights[token, slot].unsqueeze(1))
    return output.to(torch.bfloat16)
