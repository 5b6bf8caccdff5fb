"""The output gate of attention: output = attn_output * sigmoid(gate).

Computed in float32 and rounded once, at the end. Where exp(-gate) overflows (gate below -88.7), the output is a zero;
the exact value is smaller than 2^-126 |attn_output|.
"""

import torch

NUM_HEADS = 16
HEAD_DIM = 256


def run(attn_output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """attn_output and gate [num_tokens, num_heads, head_dim] -> output, the same shape."""
    assert attn_output.shape[1:] == gate.shape[1:] == (NUM_HEADS, HEAD_DIM)
    return (attn_output * torch.sigmoid(gate.float())).to(torch.bfloat16)
