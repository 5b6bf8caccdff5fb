"""Matrix product of a linear layer without bias in float16: C = A @ B.T.

The product of two float16 numbers is exact in float32. The products are summed in float32, and the sum is rounded
once, to the dtype of A. A sum beyond 65504 becomes infinite. torch's product of float16 matrices does this without
copies of A and B in float32; on a GPU, only if torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction is
False, as flashinfer-trace sets it while a reference runs. By default, cuBLAS may round parts of a long sum to float16.
"""

import torch

N = 4096
K = 4096


def run(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """Activations A [M, K] and weights B [N, K], one row per output feature -> C [M, N]."""
    assert A.shape[1] == K
    assert B.shape == (N, K)
    return A @ B.T
