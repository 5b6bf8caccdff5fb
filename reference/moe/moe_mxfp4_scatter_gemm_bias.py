"""The second product of a mixture of experts with mxfp4 weights and biases, and the weighted sum of a token's experts.

output[t] = sum over j of gammas[r] (x[r] w[e]' + bias[e]), where r = positions[t, j] is the row of choice j of token t,
and e is the expert of row r: expert 0 has the first expert_counts[0] rows, expert 1 the next expert_counts[1] rows, and
so on. gammas are routing weights.

w[e] are the weights of an expert: a byte has two e2m1 codes, that of the even feature in the low four bits; of a code,
three bits choose the magnitude from 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the highest is the sign. BLOCK features share a
scale 2^(b - 127), whose byte is b (OCP Microscaling Formats 1.0).

All arithmetic is in float32. The output is rounded once.
"""

import torch

from ._shared import sorted_mxfp4_products

NUM_EXPERTS = 128
N = 2880
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
    gammas: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [num_tokens, n] bfloat16."""
    assert x.shape[1] == K
    assert weights.shape == (NUM_EXPERTS, N, K_BYTES)
    assert weights_scale.shape == (NUM_EXPERTS, N, NUM_K_BLOCKS)
    assert bias.shape == (NUM_EXPERTS, N)
    assert expert_counts.shape == (NUM_EXPERTS,)
    products = sorted_mxfp4_products(x, weights, weights_scale, expert_counts, BLOCK)
    products = products + bias.repeat_interleave(expert_counts, dim=0)
    products = products * gammas.unsqueeze(1)
    return products[positions].sum(dim=1).to(torch.bfloat16)
