"""The experts of one rank in a mixture of experts with softmax routing, with block-scaled fp8 (e4m3) tensors.

Routing chooses the TOP_K experts with the largest logits; of equal logits, the lower index comes first. The weight of a
chosen expert is its softmax probability over all experts. With norm_topk_prob (Mixtral, Qwen3), the weights of a token
are divided by their sum; without it (Qwen2-57B), they add up to less than 1.

Each expert is a SwiGLU MLP: (silu(x W_gate') * (x W_up')) W_2'. The first half of gemm1's rows is the up projection,
the second half the gate. Only the experts local_expert_offset .. local_expert_offset + NUM_LOCAL_EXPERTS - 1 are on
this rank. Experts on other ranks contribute nothing, so a token that chose none of these gives zeros. Under tensor
parallelism, INTERMEDIATE_SIZE is the share of this rank, and the outputs of the ranks add up.

One scale belongs to BLOCK x BLOCK weights, or to BLOCK consecutive features of a token (hidden_states_scale is stored
block-major). Products are computed in float32, and the sum over the experts is rounded once. The activation between the
two products is not quantized again; kernels that do so differ by that rounding.
"""

import torch

from ._shared import dequantize, softmax_route, swiglu_mlp, tokens_of_experts

NUM_EXPERTS = 8
NUM_LOCAL_EXPERTS = 8
TOP_K = 2
HIDDEN_SIZE = 4096
INTERMEDIATE_SIZE = 14336
GEMM1_OUT_SIZE = 28672
NUM_HIDDEN_BLOCKS = 32
NUM_INTERMEDIATE_BLOCKS = 112
NUM_GEMM1_OUT_BLOCKS = 224
BLOCK = 128


def run(
    routing_logits: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    norm_topk_prob: bool,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, hidden_size] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert routing_logits.shape == (seq_len, NUM_EXPERTS)
    assert hidden_states.shape == (seq_len, HIDDEN_SIZE)
    assert hidden_states_scale.shape == (NUM_HIDDEN_BLOCKS, seq_len)
    assert gemm1_weights.shape == (NUM_LOCAL_EXPERTS, GEMM1_OUT_SIZE, HIDDEN_SIZE)
    assert gemm1_weights_scale.shape == (NUM_LOCAL_EXPERTS, NUM_GEMM1_OUT_BLOCKS, NUM_HIDDEN_BLOCKS)
    assert gemm2_weights.shape == (NUM_LOCAL_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
    assert gemm2_weights_scale.shape == (NUM_LOCAL_EXPERTS, NUM_HIDDEN_BLOCKS, NUM_INTERMEDIATE_BLOCKS)
    experts, weights = softmax_route(routing_logits, TOP_K, bool(norm_topk_prob))
    local = experts - int(local_expert_offset)
    weights = weights.float()
    blocks = hidden_states.float().view(seq_len, NUM_HIDDEN_BLOCKS, BLOCK)
    x = (blocks * hidden_states_scale.T.unsqueeze(2)).view(seq_len, HIDDEN_SIZE)
    output = torch.zeros_like(x)
    # One expert at a time, and only those that received a token: all of them in float32 would take up to 10 GB.
    for expert, token, slot in tokens_of_experts(local, NUM_LOCAL_EXPERTS):
        gemm1 = dequantize(gemm1_weights[expert], gemm1_weights_scale[expert], BLOCK)
        gemm2 = dequantize(gemm2_weights[expert], gemm2_weights_scale[expert], BLOCK)
        result = swiglu_mlp(x[token], gemm1, gemm2)
        output.index_add_(0, token, result * weights[token, slot].unsqueeze(1))
    return output.to(torch.bfloat16)
