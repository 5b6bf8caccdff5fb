"""Gated activation of a GEGLU feed-forward network (Shazeer, 2020) with the approximate GELU: output = gelu(gate) * up.

The gate is the first half of each row and up the second; gelu(x) = x (1 + tanh(z)) / 2 with
z = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, arXiv 1606.08415). (1 + tanh(z)) / 2 is the sigmoid of 2 z,
which keeps its relative accuracy for negative z, where 1 + tanh(z) cancels. Computed in float32 and rounded once, at
the end, to the dtype of the input.
"""

import math

import torch

INTERMEDIATE_SIZE = 18432
GATE_UP_SIZE = 36864


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, gate_up_size] -> output [num_tokens, intermediate_size]."""
    assert gate_up.shape[-1] == GATE_UP_SIZE
    gate, up = gate_up.float().split(INTERMEDIATE_SIZE, dim=-1)
    doubled = gate * (1 + 0.044715 * gate * gate) * (2 * math.sqrt(2 / math.pi))
    return (gate * torch.sigmoid(doubled) * up).to(gate_up.dtype)
