"""The experts of one rank in a DeepSeek-V3 mixture of experts, with block-scaled fp8 (e4m3) tensors.

Routing (without auxiliary loss): the scores s = sigmoid(logits) choose experts with a bias and weigh them without it.
The score of a group is the sum of its two largest s + bias. The best TOPK_GROUP groups are kept, and among their
experts the TOP_K with the largest s + bias are chosen. Of equal values, the lower index comes first, for groups and for
experts. The weight of a chosen expert is s / (sum of the chosen s) * routed_scaling_factor. Nothing is added to that
sum, so the weights of a token whose chosen scores are all zero in float32 (logits below about -88) are undefined, here
as in the kernels.

Each expert is a SwiGLU MLP: (silu(x W_gate') * (x W_up')) W_2'. The first half of gemm1's rows is the up projection,
the second half the gate. Only the experts local_expert_offset .. local_expert_offset + NUM_LOCAL_EXPERTS - 1 are on
this rank. Experts on other ranks contribute nothing, so a token that chose none of these gives zeros.

One scale belongs to BLOCK x BLOCK weights, or to BLOCK consecutive features of a token (hidden_states_scale is stored
block-major). Products are computed in float32, and the sum over the experts is rounded once. The activation between the
two products is not quantized again; kernels that do so differ by that rounding.
"""

import math

import torch

from ._shared import tokens_of_experts

NUM_EXPERTS = 256
NUM_LOCAL_EXPERTS = 32
TOP_K = 8
N_GROUP = 8
TOPK_GROUP = 4
HIDDEN_SIZE = 7168
INTERMEDIATE_SIZE = 2048
GEMM1_OUT_SIZE = 4096
NUM_HIDDEN_BLOCKS = 56
NUM_INTERMEDIATE_BLOCKS = 16
NUM_GEMM1_OUT_BLOCKS = 32
BLOCK = 128


def route(routing_logits: torch.Tensor, routing_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts [seq_len, TOP_K], best first, and their weights, which add up to 1."""
    scores = torch.sigmoid(routing_logits.float())
    groups = (scores + routing_bias.float()).view(len(scores), N_GROUP, NUM_EXPERTS // N_GROUP)
    group_scores = groups.topk(2, dim=2).values.sum(dim=2)
    # A stable sort puts the lower index first among equal values; topk does not specify an order.
    kept = group_scores.argsort(dim=1, descending=True, stable=True)[:, :TOPK_GROUP]
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
    candidates = groups.masked_fill(dropped.unsqueeze(2), -math.inf).flatten(1)
    experts = candidates.argsort(dim=1, descending=True, stable=True)[:, :TOP_K]
    chosen = scores.gather(1, experts)
    return experts, chosen / chosen.sum(dim=1, keepdim=True)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [rows, columns] with one scale for each BLOCK x BLOCK -> float32 [rows, columns]."""
    values = codes.float()
    values.view(scales.shape[0], BLOCK, scales.shape[1], BLOCK).mul_(scales[:, None, :, None])
    return values


def run(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [seq_len, hidden_size] bfloat16."""
    seq_len = hidden_states.shape[0]
    assert routing_logits.shape == (seq_len, NUM_EXPERTS)
    assert routing_bias.shape == (NUM_EXPERTS,)
    assert hidden_states.shape == (seq_len, HIDDEN_SIZE)
    assert hidden_states_scale.shape == (NUM_HIDDEN_BLOCKS, seq_len)
    assert gemm1_weights.shape == (NUM_LOCAL_EXPERTS, GEMM1_OUT_SIZE, HIDDEN_SIZE)
    assert gemm1_weights_scale.shape == (NUM_LOCAL_EXPERTS, NUM_GEMM1_OUT_BLOCKS, NUM_HIDDEN_BLOCKS)
    assert gemm2_weights.shape == (NUM_LOCAL_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
    assert gemm2_weights_scale.shape == (NUM_LOCAL_EXPERTS, NUM_HIDDEN_BLOCKS, NUM_INTERMEDIATE_BLOCKS)
    experts, weights = route(routing_logits, routing_bias)
    local = experts - int(local_expert_offset)
    weights = weights * float(routed_scaling_factor)
    blocks = hidden_states.float().view(seq_len, NUM_HIDDEN_BLOCKS, BLOCK)
    x = (blocks * hidden_states_scale.T.unsqueeze(2)).view(seq_len, HIDDEN_SIZE)
    output = torch.zeros_like(x)
    # One expert at a time, and only those that received a token: all of them in float32 would take 5.6 GB.
    for expert, token, slot in tokens_of_experts(local, NUM_LOCAL_EXPERTS):
        up, gate = (x[token] @ dequantize(gemm1_weights[expert], gemm1_weights_scale[expert]).T).chunk(2, dim=1)
        hidden = torch.nn.functional.silu(gate) * up
        result = hidden @ dequantize(gemm2_weights[expert], gemm2_weights_scale[expert]).T
        output.index_add_(0, token, result * weights[token, slot].unsqueeze(1))
    return output.to(torch.bfloat16)
