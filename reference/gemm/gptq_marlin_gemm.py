"""Product with symmetric 4-bit weights in GPTQ's format, C = A @ W; GROUP_SIZE input features share a scale.

qweight[i] has input features 8 i to 8 i + 7 of each output feature, the first in the lowest four bits of an int32. A
number q of 0..15 stands for (q - 8) times the scale of its group and output feature (Frantar et al., GPTQ, ICLR 2023).
Products are computed in float32; the result is rounded once, to the dtype of A. Kernels reorder weights and scales
while a model is loaded (Marlin, arXiv 2408.11743).
"""

import torch

N = 6144
K = 4096
K_PACKED = 512
GROUP_SIZE = 128
NUM_GROUPS = 32


def run(A: torch.Tensor, qweight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A [m, k], qweight int32 [k_packed, n], scales [num_groups, n] -> C [m, n]."""
    assert A.shape[1] == K
    assert qweight.shape == (K_PACKED, N)
    assert scales.shape == (NUM_GROUPS, N)
    shifts = 4 * torch.arange(8, device=qweight.device)[:, None]
    numbers = (qweight[:, None] >> shifts) & 15
    weights = (numbers.view(NUM_GROUPS, GROUP_SIZE, N) - 8) * scales.float()[:, None]
    return (A.float() @ weights.flatten(0, 1)).to(A.dtype)
