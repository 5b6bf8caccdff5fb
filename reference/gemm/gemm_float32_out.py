"""Matrix product of a linear layer without bias, C = A @ B.T, of bfloat16 matrices with a float32 result.

The product of two bfloat16 numbers is exact in float32. The products are summed in float32, and the sum is not rounded
further: a router's logits differ by less than bfloat16 can tell.
"""

import torch

N = 256
K = 7168


def run(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Activations A [m, k] and weights B [n, k], one row per output feature -> C [m, n] float32."""
    assert A.shape[1] == K
    assert B.shape == (N, K)
    return A.float() @ B.float().T
