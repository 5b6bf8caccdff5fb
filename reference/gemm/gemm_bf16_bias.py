"""Linear layer with bias: C = A @ B.T + bias, in bfloat16.

The product of two bfloat16 numbers is exact in float32. The products and the bias are summed in float32, and the sum is
rounded once, to the dtype of A.
"""

import torch

N = 4608
K = 3584


def run(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Activations A [m, k], weights B [n, k], one row per output feature, and bias [n] -> C [m, n]."""
    assert A.shape[1] == K
    assert B.shape == (N, K)
    assert bias.shape == (N,)
    return (A.float() @ B.float().T + bias.float()).to(A.dtype)
