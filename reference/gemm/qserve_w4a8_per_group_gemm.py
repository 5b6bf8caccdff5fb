"""Linear layer with 4-bit weights in groups of input features and int8 activations per token, as in QServe.

The 4-bit weights q (0..15) are dequantized in two levels (Lin et al., 2024). Within a group of GROUP input features of
an output channel, q * scale + zero is an integer in -128..127; zero is minus the zero point times the scale. The
integers times w_scale, one per channel, are the weights: C = (A @ (q * scale + zero).T) * a_scale * w_scale. The sum of
integer products is exact in float64; the result is rounded once, to float16.

Scales and zeros are stored in QServe's order: of each 32 channels, channel 8 i + j is at position 4 j + i.
"""

import torch

from ._shared import qserve_nibbles

N = 4096
K = 7168
K_BYTES = 3584
NUM_GROUPS = 56
GROUP = 128


def in_order(stored: torch.Tensor) -> torch.Tensor:
    """Values of channels in QServe's order [num_groups, n] int8 -> [n, num_groups, 1], channels in their own order."""
    return stored.unflatten(1, (N // 32, 8, 4)).mT.flatten(1).T[:, :, None]


def run(
    A: torch.Tensor,
    B: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    w_scales: torch.Tensor,
    a_scales: torch.Tensor,
) -> torch.Tensor:
    """A [m, k], packed B [n, k / 2], zeros, scales [num_groups, n], w_scales [n], a_scales [m] -> C [m, n] float16."""
    assert A.shape[1] == K
    assert B.shape == (N, K_BYTES)
    assert zeros.shape == (NUM_GROUPS, N)
    assert scales.shape == (NUM_GROUPS, N)
    assert w_scales.shape == (N,)
    # In int8, like the kernels: a product may wrap around, but with the zero it is in -128..127 again.
    weights = qserve_nibbles(B).unflatten(1, (NUM_GROUPS, GROUP)) * in_order(scales) + in_order(zeros)
    return ((A.double() @ weights.flatten(1).double().T) * a_scales[:, None] * w_scales).to(torch.float16)
