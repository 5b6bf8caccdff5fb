"""SiTU with soft caps: output = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta).

The gate is the first half of each row and up the second; |output| is at most beta * linear_beta. Computed in float32
and rounded once, at the end. Where exp(-gate) overflows (gate below -88.7), the output is a zero; the exact value is
smaller than 2^-126 beta * linear_beta.
"""

import torch

INTERMEDIATE_SIZE = 3072
GATE_UP_SIZE = 6144


def run(gate_up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """gate_up [num_tokens, gate_up_size] -> output [num_tokens, intermediate_size]."""
    assert gate_up.shape[1] == GATE_UP_SIZE
    gate, up = gate_up.float().split(INTERMEDIATE_SIZE, dim=1)
    activated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return (activated * linear_beta * torch.tanh(up / linear_beta)).to(torch.bfloat16)
