"""Matrix product of a linear layer without bias, C = A @ B.T, of float32 matrices.

Products and sums are in float32, with all 24 bits of both factors: no TF32. Some routers keep their weights in float32,
because two experts' logits may differ by less than bfloat16 can tell.
"""

import torch

N = 160
K = 5120


def run(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Activations A [m, k] and weights B [n, k], one row per output feature -> C [m, n] float32."""
    assert A.shape[1] == K
    assert B.shape == (N, K)
    return A @ B.T
