"""Top-k, then top-p sampling: one token of each row, in proportion to the probabilities of the tokens that both keep.

Top-k first: token i passes if fewer than k tokens are strictly more probable and probs[i] > 0; all tokens tied with the
k-th pass. What passes is scaled to sum to 1, so the row's own sum does not matter. Top-p then keeps token i if the
scaled mass of the tokens strictly more probable than it is less than p: the token that reaches p is the last one, also
when the mass reaches p exactly, and all tokens tied with it are kept.

k >= vocab_size and k < 0 (read as unsigned) pass every token; p > 1 keeps every token that top-k passed, p = 1 too but
for rounding. Where nothing is kept (k = 0, p <= 0, a row of zeros) the token is 0.

The mass is summed in float64; a kernel that scales and sums in float32 may decide differently for a token whose mass
above lies within its rounding error of p.
"""

import torch

from ._shared import draw, kept_mass, nucleus_threshold, top_k_threshold

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_k int32 and top_p float32 [batch_size] -> samples [batch_size] int32.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    passes = (probs >= top_k_threshold(probs, top_k)) & (probs > 0)
    # All that is more probable than a token that passes does so too: the mass above it is the whole row's.
    limit = kept_mass(probs, passes) * top_p.double().unsqueeze(-1)
    keep = passes & (probs >= nucleus_threshold(probs, limit))
    return draw(probs, keep, scaled=True).squeeze(-1).to(torch.int32)
