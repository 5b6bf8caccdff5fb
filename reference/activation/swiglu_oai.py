"""gpt-oss' SwiGLU: g * sigmoid(alpha * g) * (u + beta), with g = min(gate, limit) and u = clamp(up, -limit, limit).

The gate is the first half of each row and up the second. Computed in float32 and rounded once, at the end. Where
exp(-alpha * g) overflows, the output is a zero; the exact value is smaller than 2^-121 |u + beta| in magnitude.
"""

import torch

INTERMEDIATE_SIZE = 12288
GATE_UP_SIZE = 24576


def run(gate_up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    """gate_up [num_tokens, gate_up_size] -> output [num_tokens, intermediate_size]."""
    assert gate_up.shape[1] == GATE_UP_SIZE
    gate, up = gate_up.float().split(INTERMEDIATE_SIZE, dim=1)
    gate = gate.clamp_max(limit)
    return (gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)).to(torch.bfloat16)
