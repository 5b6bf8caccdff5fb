"""The first product of a mixture of experts with mxfp4 weights, biases and a clamped SwiGLU, of rows sorted by expert.

y[r] = x[row_tokens[r]] w[e]' + bias[e], where e is the expert of row r: expert 0 has the first expert_counts[0] rows,
expert 1 the next expert_counts[1] rows, and so on. A token has a row for each expert that it chose. Even features of y
are gates and odd ones are linear: g = min(y[r, 2i], limit), u = min(max(y[r, 2i + 1], -limit), limit) and output[r, i]
= g sigmoid(alpha g) (u + 1) (gpt-oss, 2025).

w[e] are the weights of an expert: a byte has two e2m1 codes, that of the even feature in the low four bits; of a code,
three bits choose the magnitude from 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the highest is the sign. BLOCK features share a
scale 2^(b - 127), whose byte is b (OCP Microscaling Formats 1.0).

All arithmetic is in float32. The output is rounded once.
"""

import torch

from ._shared import sorted_mxfp4_products

NUM_EXPERTS = 128
N = 5760
HALF_N = 2880
K = 2880
K_BYTES = 1440
NUM_K_BLOCKS = 90
BLOCK = 32


def run(
    x: torch.Tensor,
    weights: torch.Tensor,
    weights_scale: torch.Tensor,
    bias: torch.Tensor,
    expert_counts: torch.Tensor,
    row_tokens: torch.Tensor,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [num_rows, half_n] bfloat16."""
    assert x.shape[1] == K
    assert weights.shape == (NUM_EXPERTS, N, K_BYTES)
    assert weights_scale.shape == (NUM_EXPERTS, N, NUM_K_BLOCKS)
    assert bias.shape == (NUM_EXPERTS, N)
    assert expert_counts.shape == (NUM_EXPERTS,)
    products = sorted_mxfp4_products(x[row_tokens], weights, weights_scale, expert_counts, BLOCK)
    products = products + bias.repeat_interleave(expert_counts, dim=0)
    gate = products[:, ::2].clamp(max=limit)
    linear = products[:, 1::2].clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (linear + 1)).to(torch.bfloat16)
