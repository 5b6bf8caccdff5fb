"""Functions that the rope references share."""

import torch


def gemma_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [num_tokens, heads, head_size], weight [head_size] -> x / sqrt(mean(x^2) + eps) * (1 + weight) in float32."""
    values = x.float()
    mean_square = torch.linalg.vector_norm(values, dim=2, keepdim=True).square() / x.shape[2]
    return values * torch.rsqrt(mean_square + eps) * (1 + weight.float())


def neox_rotated(states: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """states [num_tokens, heads, head_size]; turns [num_tokens, 1, rotary_dim]: cosines, then sines."""
    cos, sin = turns.chunk(2, dim=2)
    size = turns.shape[2]
    x, y = states[:, :, :size].chunk(2, dim=2)
    return torch.cat((x * cos - y * sin, y * cos + x * sin, states[:, :, size:]), dim=2)
