"""The second product of a mixture of experts, in bfloat16, of rows sorted by expert, and the weighted sum per token.

output[t] = sum over j of gammas[r] (x[r] weights[e]), where r = positions[t, j] is the row of choice j of token t, and
e is the expert of row r: expert 0 has the first expert_counts[0] rows, expert 1 the next expert_counts[1] rows, and so
on. gammas are routing weights.

All arithmetic is in float32. The output is rounded once.
"""

import torch

from ._shared import sorted_products

NUM_EXPERTS = 128
N = 2048
K = 768


def run(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_counts: torch.Tensor,
    gammas: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [num_tokens, n] bfloat16."""
    assert x.shape[1] == K
    assert weights.shape == (NUM_EXPERTS, K, N)
    assert expert_counts.shape == (NUM_EXPERTS,)
    products = sorted_products(x, weights, expert_counts)
    products = products * gammas.unsqueeze(1)
    return products[positions].sum(dim=1).to(torch.bfloat16)
