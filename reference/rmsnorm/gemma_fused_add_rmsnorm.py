"""Residual addition followed by the root-mean-square normalization of the Gemma models.

x = hidden_states + residual in float32; residual_out = x rounded once; output = x / sqrt(mean(x^2) + EPS) * (1 +
weight): the learned weight is the difference of the scale from 1. As in the fused kernels, the norm reads the sum
before it is rounded for residual_out. Both results are rounded once, at the end. Where the sum of squares is beyond
float32's range, 3.4e38, the output is 0.
"""

import torch

HIDDEN_SIZE = 3584
EPS = 1e-6


def run(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden_states, residual [batch_size, hidden_size], weight [hidden_size] -> (output, residual_out), same shape."""
    assert hidden_states.shape[-1] == HIDDEN_SIZE
    assert residual.shape[-1] == HIDDEN_SIZE
    assert weight.shape == (HIDDEN_SIZE,)
    x = hidden_states.float() + residual.float()
    residual_out = x.to(residual.dtype)
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / HIDDEN_SIZE
    # In place on the sum: allocating memory for each step would take most of the time.
    output = x.mul_(torch.rsqrt(mean_square + EPS)).mul_(1 + weight.float()).to(hidden_states.dtype)
    return output, residual_out
