"""Gating, then root-mean-square normalization of groups of features: y / sqrt(mean(y^2) + EPS) * weight.

y = x * silu(gate), and the mean is that of the GROUP_SIZE features of a group. Mamba2 normalizes its output so
(Nemotron-H). Computed in float32 and rounded once, at the end.
"""

import torch

HIDDEN_SIZE = 8192
GROUP_SIZE = 1024
EPS = 1e-5


def run(hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden_states, gate [num_tokens, hidden_size], weight [hidden_size] -> output [num_tokens, hidden_size]."""
    assert gate.shape == hidden_states.shape and hidden_states.shape[1:] == weight.shape == (HIDDEN_SIZE,)
    gated = hidden_states * torch.nn.functional.silu(gate.float())
    gated = gated.unflatten(1, (HIDDEN_SIZE // GROUP_SIZE, GROUP_SIZE))
    root = torch.rsqrt(gated.square().mean(dim=2, keepdim=True) + EPS)
    return ((gated * root).flatten(1) * weight).bfloat16()
