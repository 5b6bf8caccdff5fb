"""Batched matrix product in bfloat16: C[b] = A[b] @ B[b].T.

The product of two bfloat16 numbers is exact in float32. The products are summed in float32, and the sum is rounded
once, to the dtype of A.
"""

import torch

BATCH_SIZE = 128
N = 512
K = 128


def run(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A [batch_size, m, k] and B [batch_size, n, k] -> C [batch_size, m, n]."""
    assert A.shape[0] == BATCH_SIZE
    assert A.shape[2] == K
    assert B.shape == (BATCH_SIZE, N, K)
    return (A.float() @ B.float().mT).to(A.dtype)
