"""SwiGLU with clamped halves: output = silu(min(gate, limit)) * clamp(up, -limit, limit).

The gate is the first half of each row and up the second; silu(x) = x / (1 + exp(-x)). The limit is a positive bf16
number: kernels clamp bf16 values. Computed in float32 and rounded once, at the end. Where exp(-x) overflows (x below
-88.7), silu is -0; the exact value is smaller than 2^-121 in magnitude.
"""

import torch

INTERMEDIATE_SIZE = 2048
GATE_UP_SIZE = 4096


def run(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """gate_up [num_tokens, gate_up_size] -> output [num_tokens, intermediate_size]."""
    assert gate_up.shape[1] == GATE_UP_SIZE
    gate, up = gate_up.float().split(INTERMEDIATE_SIZE, dim=1)
    return (torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)).to(torch.bfloat16)
