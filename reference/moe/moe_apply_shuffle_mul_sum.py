"""Gathers the results of a token's TOP_K experts, weighs them, and adds them up.

output[t] = sum over j of factors[t, j] * hidden_states[permutation[t, j]], in float32, rounded once. permutation is the
row of each (token, choice) pair among rows that are sorted by expert.
"""

import torch

TOP_K = 8
HIDDEN_SIZE = 7168


def run(hidden_states: torch.Tensor, permutation: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """hidden_states bfloat16 [num_rows, hidden_size] -> output bfloat16 [seq_len, hidden_size]."""
    seq_len = permutation.shape[0]
    assert hidden_states.shape == (hidden_states.shape[0], HIDDEN_SIZE)
    assert permutation.shape == (seq_len, TOP_K)
    assert factors.shape == (seq_len, TOP_K)
    rows = hidden_states[permutation.flatten().long()].view(seq_len, TOP_K, HIDDEN_SIZE)
    # A product of two bfloat16 numbers is exact in float32.
    return (rows.float() * factors.float().unsqueeze(2)).sum(dim=1).to(torch.bfloat16)
