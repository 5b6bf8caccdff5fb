"""The experts of one rank in a DeepSeek-V3 mixture of experts, in bfloat16.

Routing (without auxiliary loss): the scores s = sigmoid(logits) choose experts with a bias and weigh them without it.
The score of a group is the sum of its two largest s + bias. The best TOPK_GROUP groups are kept, and among their
experts the TOP_K with the largest s + bias are chosen. Of equal values, the lower index comes first, for groups and for
experts. The weight of a chosen expert is s / (sum of the chosen s) * routed_scaling_factor.

Each expert is a SwiGLU MLP: (silu(x W_gate') * (x W_up')) W_2'. The first half of gemm1's rows is the up projection,
the second half the gate. Only the experts local_expert_offset .. local_expert_offset + NUM_LOCAL_EXPERTS - 1 are on
this rank. Experts on other ranks contribute nothing, so a token that chose none of these gives zeros.

The router is computed in float64 and the experts in float32: nothing is rounded between the products, and the sum over
the experts is rounded once. Kernels that keep the first product, the activation or the result of each expert in
bfloat16 differ by those roundings.
"""

import torch

from ._shared import deepseek_route, swiglu_mlp, tokens_of_experts

NUM_EXPERTS = 256
NUM_LOCAL_EXPERTS = 32
TOP_K = 8
N_GROUP = 8
TOPK_GROUP = 4
HIDDEN_SIZE = 7168
INTERMEDIATE_SIZE = 2048
GEMM1_OUT_SIZE = 4096


def run(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, hidden_size] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert routing_logits.shape == (seq_len, NUM_EXPERTS)
    assert routing_bias.shape == (NUM_EXPERTS,)
    assert hidden_states.shape == (seq_len, HIDDEN_SIZE)
    assert gemm1_weights.shape == (NUM_LOCAL_EXPERTS, GEMM1_OUT_SIZE, HIDDEN_SIZE)
    assert gemm2_weights.shape == (NUM_LOCAL_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
    experts, scores = deepseek_route(routing_logits, routing_bias, N_GROUP, TOPK_GROUP, TOP_K)
    weights = (scores / scores.sum(dim=1, keepdim=True) * routed_scaling_factor).float()
    local = experts - int(local_expert_offset)
    x = hidden_states.float()
    output = torch.zeros_like(x)
    # One expert at a time, and only those that received a token: all of them in float32 would take 5.6 GB.
    for expert, token, slot in tokens_of_experts(local, NUM_LOCAL_EXPERTS):
        result = swiglu_mlp(x[token], gemm1_weights[expert].float(), gemm2_weights[expert].float())
        output.index_add_(0, token, result * weights[token, slot].unsqueeze(1))
    return output.to(torch.bfloat16)
