"""Layer normalization with scale and bias (Ba, Kiros and Hinton, 2016).

output = (x - mean(x)) / sqrt(var(x) + EPS) * weight + bias, where var is the mean of the squared deviations from the
mean of the row, without Bessel's correction. EPS is
[[EPS == 1e-6: 1e-6, the default of FlashInfer and SGLang]][[EPS == 1e-5: 1e-5, the default of PyTorch]].

The deviations are formed before they are squared: mean(x^2) - mean(x)^2 cancels in rows whose mean is large. Computed
in float32 and rounded once, at the end, to the dtype of the input. A row of equal values gives the bias. Where the sum
of squared differences is beyond float32's range, 3.4e38, the output is the bias.
"""

import torch

HIDDEN_SIZE = 128
EPS = 1e-6


def run(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """hidden_states [batch_size, hidden_size], weight and bias [hidden_size] -> output [batch_size, hidden_size]."""
    assert hidden_states.shape[-1] == HIDDEN_SIZE
    assert weight.shape == (HIDDEN_SIZE,)
    assert bias.shape == (HIDDEN_SIZE,)
    x = hidden_states.to(torch.float32, copy=True)
    # In place on the float32 copy: allocating memory for each step would take most of the time.
    x.sub_(x.mean(dim=-1, keepdim=True))
    variance = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / HIDDEN_SIZE
    return x.mul_(torch.rsqrt(variance + EPS)).mul_(weight).add_(bias).to(hidden_states.dtype)
