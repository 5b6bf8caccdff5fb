"""The first product of a mixture of experts, in bfloat16, of rows that are sorted by expert.

output[r] = x[row_tokens[r]] weights[e], where e is the expert of row r: expert 0 has the first expert_counts[0] rows,
expert 1 the next expert_counts[1] rows, and so on. A token has a row for each expert that it chose.

Products are computed in float32 and rounded once.
"""

import torch

from ._shared import sorted_products

NUM_EXPERTS = 128
N = 1536
K = 2048


def run(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_counts: torch.Tensor,
    row_tokens: torch.Tensor,
) -> torch.Tensor:
    """Tensors with the shapes asserted below -> output [num_rows, n] bfloat16."""
    assert x.shape[1] == K
    assert weights.shape == (NUM_EXPERTS, K, N)
    assert expert_counts.shape == (NUM_EXPERTS,)
    return sorted_products(x[row_tokens], weights, expert_counts).to(torch.bfloat16)
