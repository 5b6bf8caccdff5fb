"""The experts of one rank in a DeepSeek-V3 mixture of experts, with nvfp4 tensors: fp4 (e2m1) with e4m3 block scales.

Routing (without auxiliary loss): the scores s = sigmoid(logits) choose experts with a bias and weigh them without it.
The score of a group is the sum of its two largest s + bias. The best TOPK_GROUP groups are kept, and among their
experts the TOP_K with the largest s + bias are chosen. Of equal values, the lower index comes first, for groups and for
experts. The weight of a chosen expert is s / (sum of the chosen s) * routed_scaling_factor.

Each expert is a SwiGLU MLP. The first half of gemm1's rows is the up projection, the second half the gate:
output1_scale_scalar * up * silu(output1_scale_gate_scalar * gate), then W_2 times output2_scale_scalar. These three
factors of each expert have the global scales of the tensors; output1_scale_scalar also has the one with which kernels
quantize the activation, which output2_scale_scalar takes out again. Only the experts local_expert_offset ..
local_expert_offset + NUM_LOCAL_EXPERTS - 1 are on this rank; experts on other ranks contribute nothing.

A byte has two fp4 codes, that of the even feature in the low four bits; of a code, three bits choose the magnitude from
0, 0.5, 1, 1.5, 2, 3, 4, 6, and the highest is the sign. BLOCK consecutive features share one scale, an e4m3 number.
Scales are listed row by row. Kernels take weights with their rows permuted, and their scales in tiles.
The router is computed in float64 and the experts in float32; the sum over the experts is rounded once. The activation
between the two products is not quantized again; kernels that do so differ by that rounding.
"""

import torch

from ._shared import deepseek_route, dequantize_fp4, tokens_of_experts

NUM_EXPERTS = 256
NUM_LOCAL_EXPERTS = 32
TOP_K = 8
N_GROUP = 8
TOPK_GROUP = 4
HIDDEN_SIZE = 7168
INTERMEDIATE_SIZE = 2048
GEMM1_OUT_SIZE = 4096
HIDDEN_BYTES = 3584
INTERMEDIATE_BYTES = 1024
NUM_HIDDEN_BLOCKS = 448
NUM_INTERMEDIATE_BLOCKS = 128
BLOCK = 16


def run(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    output1_scale_scalar: torch.Tensor,
    output1_scale_gate_scalar: torch.Tensor,
    output2_scale_scalar: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, hidden_size] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert routing_logits.shape == (seq_len, NUM_EXPERTS)
    assert routing_bias.shape == (NUM_EXPERTS,)
    assert hidden_states.shape == (seq_len, HIDDEN_BYTES)
    assert hidden_states_scale.shape == (seq_len, NUM_HIDDEN_BLOCKS)
    assert gemm1_weights.shape == (NUM_LOCAL_EXPERTS, GEMM1_OUT_SIZE, HIDDEN_BYTES)
    assert gemm1_weights_scale.shape == (NUM_LOCAL_EXPERTS, GEMM1_OUT_SIZE, NUM_HIDDEN_BLOCKS)
    assert gemm2_weights.shape == (NUM_LOCAL_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_BYTES)
    assert gemm2_weights_scale.shape == (NUM_LOCAL_EXPERTS, HIDDEN_SIZE, NUM_INTERMEDIATE_BLOCKS)
    assert output1_scale_scalar.shape == output1_scale_gate_scalar.shape == (NUM_LOCAL_EXPERTS,)
    assert output2_scale_scalar.shape == (NUM_LOCAL_EXPERTS,)
    experts, scores = deepseek_route(routing_logits, routing_bias, N_GROUP, TOPK_GROUP, TOP_K)
    weights = (scores / scores.sum(dim=1, keepdim=True) * routed_scaling_factor).float()
    local = experts - int(local_expert_offset)
    x = dequantize_fp4(hidden_states, hidden_states_scale, BLOCK)
    output = torch.zeros_like(x)
    # One expert at a time, and only those that received a token: all of them in float32 would take 5.6 GB.
    for expert, token, slot in tokens_of_experts(local, NUM_LOCAL_EXPERTS):
        both = x[token] @ dequantize_fp4(gemm1_weights[expert], gemm1_weights_scale[expert], BLOCK).T
        up, gate = both.chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate * output1_scale_gate_scalar[expert]) * up * output1_scale_scalar[expert]
        result = hidden @ dequantize_fp4(gemm2_weights[expert], gemm2_weights_scale[expert], BLOCK).T
        factor = weights[token, slot] * output2_scale_scalar[expert]
        output.index_add_(0, token, result * factor.unsqueeze(1))
    return output.to(torch.bfloat16)
