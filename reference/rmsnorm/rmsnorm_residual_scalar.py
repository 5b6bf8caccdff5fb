"""RMSNorm, then the residual, then a factor of the whole layer, as Gemma-4 ends a layer.

output = (x / sqrt(mean(x^2) + EPS) * weight + residual) * scalar. Computed in float32 and rounded once, at the end, to
the dtype of the input. Where the sum of squares is beyond float32's range, 3.4e38, the norm is 0.
"""

import torch

from ._shared import rms_normed

HIDDEN_SIZE = 5376
EPS = 1e-6


def run(hidden_states: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, scalar: float) -> torch.Tensor:
    """hidden_states, residual [batch_size, hidden_size]; weight [hidden_size] -> output, as residual."""
    assert hidden_states.shape[1] == residual.shape[1] == weight.shape[0] == HIDDEN_SIZE
    total = rms_normed(hidden_states.float(), weight, EPS) + residual
    return (total * scalar).to(torch.bfloat16)
