"""Root-mean-square normalization of the Gemma models: output = x / sqrt(mean(x^2) + EPS) * (1 + weight).

The learned weight is the difference of the scale from 1. Computed in float32 and rounded once, at the end, to the dtype
of the input; in bfloat16, 1 + weight would lose most bits of a small weight. A row of zeros gives zeros. Where the sum
of squares is beyond float32's range, 3.4e38, the output is 0.
"""

import torch

HIDDEN_SIZE = 3584
EPS = 1e-6


def run(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states [batch_size, hidden_size], weight [hidden_size] -> output [batch_size, hidden_size]."""
    assert hidden_states.shape[-1] == HIDDEN_SIZE
    assert weight.shape == (HIDDEN_SIZE,)
    x = hidden_states.to(torch.float32, copy=True)
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / HIDDEN_SIZE
    # In place on the float32 copy: allocating memory for each step would take most of the time.
    return x.mul_(torch.rsqrt(mean_square + EPS)).mul_(1 + weight.float()).to(hidden_states.dtype)
