"""Top-k, then top-p sampling: one token per row, in proportion to the probabilities of the tokens that both keep.

Top-k comes first: token i passes if fewer than k tokens are strictly more probable and probs[i] > 0, so all tokens tied
with the k-th pass. Their probabilities are scaled to sum to 1, so the sum of the row does not matter. Top-p then keeps
token i if the scaled mass of the strictly more probable tokens is less than p: the token with which the mass reaches or
exceeds p is the last one kept, together with all tokens tied with it.

k >= vocab_size and k < 0 (read as unsigned) pass every token. p > 1 keeps every token that top-k passed; so does p = 1,
except for rounding. If nothing is kept (k = 0, p <= 0, a row of zeros), the token is 0.

The mass is summed in float64. A kernel that scales and sums in float32 may decide differently about a token if the mass
above it is within the rounding error of p.
"""

import torch

from ._shared import draw, kept_mass, nucleus_threshold, top_k_threshold

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_k int32 and top_p float32 [batch_size] -> samples [batch_size] int64.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    passes = (probs >= top_k_threshold(probs, top_k)) & (probs > 0)
    # Every token more probable than one that passes also passes, so the mass above it can be taken from the whole row.
    limit = kept_mass(probs, passes) * top_p.double().unsqueeze(-1)
    keep = passes & (probs >= nucleus_threshold(probs, limit))
    return draw(probs, keep, scaled=True).squeeze(-1)
