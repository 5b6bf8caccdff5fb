"""Top-p (nucleus) renormalization: the most probable tokens whose mass reaches p, scaled to sum to 1; the rest are 0.

Token i is kept if the mass of the strictly more probable tokens is less than p times the row's sum. In descending
order, the token with which the mass reaches or exceeds that limit is the last one kept, together with all tokens tied
with it. Here p is a share of the row's sum; in top-p sampling it is absolute mass. p > 1 keeps the whole row; so does p
= 1, except for rounding. p <= 0 keeps the largest value and its ties.

In vocabularies of 2048 tokens or more, FlashInfer 0.6.12 may drop more than rounding explains, for p >= 1 and for p at
a cumulative mass of the row: if its search does not reach its target, it counts the last group of bins twice. That is a
defect, not a rule.

A kept sum of at most 1e-8 is not scaled, so a row of zeros gives zeros. Computed in float64 and rounded once to
float32. A kernel that sums in float32 may decide differently about a token if the mass above it is within the summation
error of the limit; it then scales by its own kept sum.
"""

import torch

from ..sampling._shared import kept_mass, nucleus_threshold

VOCAB_SIZE = 129280
SMALLEST_SUM = 1e-8


def run(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_p [batch_size] float32 -> renorm_probs, as probs."""
    assert probs.shape[-1] == VOCAB_SIZE
    limit = probs.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p.double().unsqueeze(-1)
    keep = probs >= torch.minimum(nucleus_threshold(probs, limit), probs.amax(dim=-1, keepdim=True))
    total = kept_mass(probs, keep)
    scale = torch.where(total > SMALLEST_SUM, total, 1.0)
    return (torch.where(keep, probs, 0.0).double() / scale).float()
