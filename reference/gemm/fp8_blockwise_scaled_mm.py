"""Linear layer without bias in block-scaled fp8 (e4m3), as in DeepSeek-V3: C = (A * A_scale) @ (B * B_scale).T.

One scale belongs to BLOCK consecutive features of a token, and to BLOCK x BLOCK weights. The last block of rows of B is
smaller where n is not a multiple of BLOCK. Computed in float32 and rounded once, to bfloat16.
"""

import torch

N = 4096
K = 7168
NUM_N_BLOCKS = 32
NUM_K_BLOCKS = 56
BLOCK = 128


def run(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor) -> torch.Tensor:
    """A [m, k], B [n, k] fp8; A_scale [m, num_k_blocks], B_scale [num_n_blocks, num_k_blocks] -> C [m, n] bfloat16."""
    assert A.shape[1] == K
    assert B.shape == (N, K)
    assert A_scale.shape[1] == NUM_K_BLOCKS
    assert B_scale.shape == (NUM_N_BLOCKS, NUM_K_BLOCKS)
    # In place: float32 weights take up to a gigabyte.
    x = A.float().view(-1, NUM_K_BLOCKS, BLOCK).mul_(A_scale[:, :, None])
    row_scales = B_scale.repeat_interleave(BLOCK, dim=0)[:N]
    weights = B.float().view(N, NUM_K_BLOCKS, BLOCK).mul_(row_scales[:, :, None])
    return (x.flatten(1) @ weights.flatten(1).T).to(torch.bfloat16)
