"""Gathers the results of a token's TOP_K experts, weighs them, and adds them up.

output[t] = sum over j of factors[t, j] * hidden_states[permutation[t, j]], in float32, rounded once. permutation is the
row of each (token, choice) pair among rows that are sorted by expert.
"""

import torch

TOP_K = 8
HIDDEN_SIZE = 7168


def run(hidden_states: torch.Tensor, permutation: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """hidden_states bfloat16 [num_rows, hidden_size] -> output bfloat16 [seq_len, hidden_size]."""
    assert hidden_states.shape[1] == HIDDEN_SIZE
    assert permutation.shape[1] == TOP_K
    assert factors.shape[1] == TOP_K
    # A product of two bfloat16 numbers is exact in float32.
    terms = hidden_states[permutation] * factors.float().unsqueeze(2)
    return terms.sum(dim=1).to(torch.bfloat16)
