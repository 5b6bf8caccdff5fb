"""The sum of hidden states and residual, its RMSNorm, and the quantization of that to e4m3 with one scale.

With s = hidden_states + residual, output = s / sqrt(mean(s^2) + EPS) * weight / scale, clamped to -448..448 and rounded
once to the nearest e4m3 number; residual_out is s, rounded once. Computed in float32. Where the sum of squares is
beyond float32's range, 3.4e38, the output is 0.
"""

import torch

from ._shared import rms_normed

HIDDEN_SIZE = 4096
EPS = 1e-6
LARGEST = 448.0


def run(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden_states, residual [batch_size, hidden_size] bfloat16 -> output e4m3, residual_out bfloat16, same shape."""
    assert hidden_states.shape[1] == residual.shape[1] == weight.shape[0] == HIDDEN_SIZE
    total = hidden_states.float() + residual
    quotient = rms_normed(total, weight, EPS) / scale
    return quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), total.to(torch.bfloat16)
