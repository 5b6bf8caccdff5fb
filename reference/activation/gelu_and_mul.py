"""Gated activation of a GEGLU feed-forward network (Shazeer, 2020): output = gelu(gate) * up.

The gate is the first half of each row and up the second; gelu(x) = x * Phi(x), where Phi is the distribution function
of the standard normal distribution. This is the exact form, not the approximation with tanh. Phi(x) is erfc(-x /
sqrt(2)) / 2, which keeps its relative accuracy for negative x, where 1 + erf(x / sqrt(2)) cancels. Computed in float32
and rounded once, at the end, to the dtype of the input. Where erfc underflows (x below about -14.2) gelu is -0.
"""

import math

import torch

INTERMEDIATE_SIZE = 18432
GATE_UP_SIZE = 36864


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, gate_up_size] -> output [num_tokens, intermediate_size]."""
    assert gate_up.shape[-1] == GATE_UP_SIZE
    gate, up = gate_up.float().split(INTERMEDIATE_SIZE, dim=-1)
    activated = gate * torch.erfc(gate * -math.sqrt(0.5)).mul_(0.5)
    return activated.mul_(up).to(gate_up.dtype)
