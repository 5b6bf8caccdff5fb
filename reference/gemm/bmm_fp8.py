"""Batched matrix product in fp8 (e4m3) with one scale for each operand: C[b] = (A[b] @ B[b].T) * A_scale * B_scale.

Products and sums are in float32, and the scaled sum is rounded once, to bfloat16. Kernels on Hopper sum in the tensor
core, which cuts terms off below the 13th bit after the largest term's leading one.
"""

import torch

BATCH_SIZE = 128
N = 512
K = 128


def run(A: torch.Tensor, B: torch.Tensor, A_scale: float, B_scale: float) -> torch.Tensor:
    """A [batch_size, m, k], B [batch_size, n, k] float8_e4m3fn, two scales -> C [batch_size, m, n] bfloat16."""
    assert A.shape[0] == BATCH_SIZE
    assert A.shape[2] == K
    assert B.shape == (BATCH_SIZE, N, K)
    return ((A.float() @ B.float().mT) * A_scale * B_scale).to(torch.bfloat16)
