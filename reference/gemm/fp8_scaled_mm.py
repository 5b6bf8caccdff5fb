"""Linear layer without bias in fp8 (e4m3): C = (A @ B.T) * A_scale * B_scale, with a scale per token and per feature.

Products and sums are in float32, and the scaled sum is rounded once, to bfloat16. Kernels on Hopper sum in the tensor
core, which cuts terms off below the 13th bit after the largest term's leading one: where all terms have the same sign,
they come out low by up to 25 % at k = 16384.
"""

import torch

N = 2112
K = 7168


def run(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor) -> torch.Tensor:
    """A [m, k], B [n, k] float8_e4m3fn, A_scale [m], B_scale [n] float32 -> C [m, n] bfloat16."""
    assert A.shape[1] == K
    assert B.shape == (N, K)
    assert B_scale.shape == (N,)
    return ((A.float() @ B.float().T) * A_scale[:, None] * B_scale).to(torch.bfloat16)
