"""Top-p (nucleus) renormalisation: the most probable tokens whose mass reaches p, scaled to sum to 1, all others 0.

Token i is kept if the mass of the tokens strictly more probable than it is less than p times the row's sum. In
descending order, the token that reaches that mass is the last one, also when it is reached exactly; all tokens tied
with it are kept. p is a share of the row's sum here, unlike in top-p sampling, where it is absolute mass. p > 1 keeps
the whole row, p = 1 too but for rounding; p <= 0 keeps the largest value and its ties.

flashinfer 0.6.12 may drop more than rounding explains for p >= 1 in vocabularies of 2048 tokens and more: where its
search does not reach p times its rounded sum, it counts the last group of bins twice. That is a defect, not a rule.

A kept sum of at most 1e-8 is not scaled: a row of zeros gives zeros. Computed in float64, rounded once to float32; a
kernel that sums in float32 may decide differently for a token whose mass above lies within its summation error of the
limit, and then scales by its own kept sum.
"""

import torch

from ._shared import kept_mass, nucleus_threshold

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
