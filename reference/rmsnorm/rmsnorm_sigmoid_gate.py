"""Root-mean-square normalization of heads, weighted, then gated: x / sqrt(mean(x^2) + EPS) * weight * sigmoid(gate).

Linear attention normalizes its output so (Kimi-Linear). Computed in float32 and rounded once, at the end.
"""

import torch

HEAD_DIM = 128
EPS = 1e-5


def run(hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states, gate [num_rows, head_dim], weight [head_dim] -> output [num_rows, head_dim]."""
    assert gate.shape == hidden_states.shape and hidden_states.shape[1:] == weight.shape == (HEAD_DIM,)
    x = hidden_states.float()
    root = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS)
    return (x * root * weight * torch.sigmoid(gate.float())).bfloat16()
