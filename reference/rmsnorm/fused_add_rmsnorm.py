"""Residual addition followed by root-mean-square normalization; only the norm is an output.

x = hidden_states + residual in float32; output = x / sqrt(mean(x^2) + EPS) * weight, rounded once, at the end. As in
the fused kernels, the norm reads the sum before it is rounded to the residual's dtype.
[[EPS == 1e-5: EPS is 1e-5, as in Llama and Mixtral; most other models use 1e-6.]] Where the sum of squares is
beyond float32's range, 3.4e38, the output is 0.
"""

import torch

HIDDEN_SIZE = 7168
EPS = 1e-6


def run(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states, residual [batch_size, hidden_size], weight [hidden_size] -> output [batch_size, hidden_size]."""
    assert hidden_states.shape[-1] == HIDDEN_SIZE
    assert residual.shape[-1] == HIDDEN_SIZE
    assert weight.shape == (HIDDEN_SIZE,)
    x = hidden_states.float() + residual
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / HIDDEN_SIZE
    # In place on the sum: allocating memory for each step would take most of the time.
    return x.mul_(torch.rsqrt(mean_square + EPS)).mul_(weight).to(hidden_states.dtype)
