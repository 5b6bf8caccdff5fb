"""Linear layer without bias in nvfp4: C = alpha * (A * A_scale) @ (B * B_scale).T.

A and B hold e2m1 numbers (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two in a byte, and an e4m3 scale belongs to
each 16 consecutive input features; alpha undoes the scales of whole tensors. The block scales are stored as the tensor
core reads them: padded to 128 rows and 4 columns, in tiles. The padding may hold anything.
Computed in float32, where the scaled products are exact, and rounded once, to bfloat16.
"""

import torch

from ._shared import nvfp4_values, unswizzled

N = 4096
K = 7168
K_BYTES = 3584
PADDED_N = 4096
PADDED_SCALES = 448
BLOCK = 16


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed numbers [rows, k / 2] and their stored scales -> float32 [rows, k]."""
    rows = packed.shape[0]
    blocks = nvfp4_values(packed).unflatten(1, (K // BLOCK, BLOCK))
    return (blocks * unswizzled(scales, rows, K // BLOCK)[:, :, None]).flatten(1)


def run(A: torch.Tensor, B: torch.Tensor, A_scale: torch.Tensor, B_scale: torch.Tensor, alpha: float) -> torch.Tensor:
    """A [m, k / 2], B [n, k / 2] packed, A_scale [padded_m, padded_scales], B_scale likewise -> C [m, n] bfloat16."""
    assert A.shape[1] == K_BYTES
    assert B.shape == (N, K_BYTES)
    assert A_scale.shape[1] == PADDED_SCALES
    assert B_scale.shape == (PADDED_N, PADDED_SCALES)
    return ((dequantize(A, A_scale) @ dequantize(B, B_scale).T) * alpha).to(torch.bfloat16)
