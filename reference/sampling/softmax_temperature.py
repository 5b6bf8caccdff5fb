"""Probabilities of the next token: the softmax of a row of logits over its temperature.

probs = exp(z - max z) / sum exp(z - max z) for z = logits / temperature, computed in float64 and rounded once, to
float32. Temperatures are positive; a logit of -inf has probability 0, and each row has a finite logit.
"""

import torch

VOCAB_SIZE = 129280


def run(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits [batch_size, vocab_size], temperature [batch_size] -> probs [batch_size, vocab_size]."""
    assert logits.shape[1] == VOCAB_SIZE
    return torch.softmax(logits.double() / temperature[:, None], dim=1).float()
