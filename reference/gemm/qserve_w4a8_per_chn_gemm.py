"""Linear layer with 4-bit weights per output channel and int8 activations per token, as in QServe (Lin et al., 2024).

Weights are q * w_scale - w_szero with q in 0..15 and w_szero = zero point * w_scale.
C = (A @ q.T) * a_scale * w_scale - a_sum * w_szero, where a_sum is the sum of the token's dequantized activations.
The sum of integer products is exact in float64; the result is rounded once, to float16.
"""

import torch

from ._shared import qserve_nibbles

N = 4096
K = 7168
K_BYTES = 3584


def run(
    A: torch.Tensor,
    B: torch.Tensor,
    w_scales: torch.Tensor,
    a_scales: torch.Tensor,
    w_szeros: torch.Tensor,
    a_sums: torch.Tensor,
) -> torch.Tensor:
    """A [m, k] int8, B [n, k / 2] packed, w_scales, w_szeros [n], a_scales, a_sums [m] float16 -> C [m, n] float16."""
    assert A.shape[1] == K
    assert B.shape == (N, K_BYTES)
    assert w_scales.shape == (N,)
    assert w_szeros.shape == (N,)
    product = A.double() @ qserve_nibbles(B).double().T
    scaled = product * a_scales[:, None] * w_scales
    return (scaled - a_sums.float()[:, None] * w_szeros).to(torch.float16)
