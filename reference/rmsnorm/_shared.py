"""Functions that the rmsnorm references share."""

import torch


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [batch_size, hidden_size] float32, weight [hidden_size] -> x / sqrt(mean(x^2) + eps) * weight in float32."""
    mean_square = torch.linalg.vector_norm(x, dim=1, keepdim=True).square() / x.shape[1]
    return x * torch.rsqrt(mean_square + eps) * weight
