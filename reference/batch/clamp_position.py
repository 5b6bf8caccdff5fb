"""The position of the token that each request decodes: its length with that token, minus one.

A request without tokens, which pads the batch of a CUDA graph, has position 0.
"""

import torch


def run(seq_lens: torch.Tensor) -> torch.Tensor:
    """seq_lens int64 [batch_size] -> positions int64 [batch_size]."""
    return (seq_lens - 1).clamp_min(0)
