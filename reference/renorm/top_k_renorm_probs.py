"""Top-k renormalization: the k largest probabilities of each row, scaled to sum to 1; the rest are 0.

Values greater than or equal to the k-th largest are kept. That includes all values tied with it, so more than k may
remain. k >= vocab_size and k < 0 (read as unsigned) keep the whole row and still scale it; k = 0 gives zeros. A kept
sum below 1e-8 is replaced by 1e-8, so a row of zeros gives zeros. Computed in float64 and rounded once to float32.
"""

import torch

from ..sampling._shared import kept_mass, top_k_threshold

VOCAB_SIZE = 129280
SMALLEST_SUM = 1e-8


def run(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_k [batch_size] int32 -> renorm_probs, as probs."""
    assert probs.shape[-1] == VOCAB_SIZE
    keep = probs >= top_k_threshold(probs, top_k)
    total = kept_mass(probs, keep).clamp_min(SMALLEST_SUM)
    return (torch.where(keep, probs, 0.0).double() / total).float()
