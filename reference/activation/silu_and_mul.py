"""Gated activation of a SwiGLU feed-forward network (Shazeer, 2020): output = silu(gate) * up.

The gate is the first half of each row and up the second; silu(x) = x / (1 + exp(-x)). The result is computed in float32
and rounded once, at the end, to the dtype of the input. Where exp(-x) overflows (x below -88.7), silu is -0; the exact
value is smaller than 2^-121 in magnitude.
"""

import torch

INTERMEDIATE_SIZE = 14336
GATE_UP_SIZE = 28672


def run(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, gate_up_size] -> output [num_tokens, intermediate_size]."""
    assert gate_up.shape[-1] == GATE_UP_SIZE
    gate, up = gate_up.split(INTERMEDIATE_SIZE, dim=-1)
    # In place on the float32 copy: allocating memory for each step would take most of the time.
    activated = torch.nn.functional.silu(gate.to(torch.float32, copy=True), inplace=True)
    return activated.mul_(up).to(gate_up.dtype)
