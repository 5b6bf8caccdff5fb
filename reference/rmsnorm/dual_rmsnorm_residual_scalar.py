"""The norms of two branches, the norm of their sum, the residual and a factor, as Gemma-4 ends a layer with experts.

With norm(x, w) = x / sqrt(mean(x^2) + EPS) * w, output = (norm(norm(x1, w1) + norm(x2, w2), w3) + residual) * scalar.
Computed in float32 and rounded once, at the end, to the dtype of the input. Where a sum of squares is beyond float32's
range, 3.4e38, its norm is 0.
"""

import torch

from ._shared import rms_normed

HIDDEN_SIZE = 2816
EPS = 1e-6


def run(
    x1: torch.Tensor,
    weight1: torch.Tensor,
    x2: torch.Tensor,
    weight2: torch.Tensor,
    weight3: torch.Tensor,
    residual: torch.Tensor,
    scalar: float,
) -> torch.Tensor:
    """x1, x2, residual [batch_size, hidden_size]; weights [hidden_size] -> output, as residual."""
    assert x1.shape[1] == x2.shape[1] == residual.shape[1] == HIDDEN_SIZE
    assert weight1.shape[0] == weight2.shape[0] == weight3.shape[0] == HIDDEN_SIZE
    both = rms_normed(x1.float(), weight1, EPS) + rms_normed(x2.float(), weight2, EPS)
    total = rms_normed(both, weight3, EPS) + residual
    return (total * scalar).to(torch.bfloat16)
