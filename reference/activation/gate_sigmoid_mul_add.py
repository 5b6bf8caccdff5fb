"""The gated output of a shared expert plus that of the routed ones: routed + sigmoid(hidden . gate_weight) * shared.

The gate is one number for each token. Computed in float32 and rounded once, at the end.
"""

import torch

HIDDEN_SIZE = 2048


def run(
    hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor, routed_output: torch.Tensor
) -> torch.Tensor:
    """hidden_states, shared_output, routed_output [num_tokens, hidden_size], gate_weight [hidden_size] -> output."""
    assert hidden_states.shape[1] == gate_weight.shape[0] == HIDDEN_SIZE
    assert shared_output.shape[1] == routed_output.shape[1] == HIDDEN_SIZE
    gate = torch.sigmoid((hidden_states.float() * gate_weight).sum(dim=1, keepdim=True))
    return (routed_output + gate * shared_output).to(torch.bfloat16)
