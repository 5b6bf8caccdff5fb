"""RMSNorm, and its quantization to e4m3 with one scale for the tensor.

output = x / sqrt(mean(x^2) + EPS) * weight / scale, clamped to -448..448 and rounded once to the nearest e4m3 number.
Computed in float32. Where the sum of squares is beyond float32's range, 3.4e38, the output is 0.
"""

import torch

from ._shared import rms_normed

HIDDEN_SIZE = 4096
EPS = 1e-6
LARGEST = 448.0


def run(hidden_states: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """hidden_states [batch_size, hidden_size] bfloat16, weight [hidden_size] -> output, as hidden_states, e4m3."""
    assert hidden_states.shape[1] == weight.shape[0] == HIDDEN_SIZE
    quotient = rms_normed(hidden_states.float(), weight, EPS) / scale
    return quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
