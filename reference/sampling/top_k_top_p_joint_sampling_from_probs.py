"""Top-k and top-p sampling at once: one token per row, in proportion to the probabilities of the tokens that both keep.

Both filters look at the row as it is. Token i is kept if fewer than k tokens are strictly more probable, the mass of
the strictly more probable tokens is less than p, and probs[i] > 0. All tokens tied with the last one kept are kept as
well. p is absolute mass, not a share of what top-k keeps: this is where it differs from top-k before top-p.
k >= vocab_size and k < 0 (read as unsigned) pass every token; k = 0 passes none. In a row that sums to 1, p > 1 passes
every token; so does p = 1, except for rounding. p <= 0 passes none.

Draw: rows should sum to 1. The kernel samples by rejection and does not scale the first draw by the sum of the row. If
a row sums to more than 1, the first draw reaches only tokens whose cumulative mass, in order of index, begins below 1;
if it sums to less, the missing mass goes to the last token with a positive probability. A first draw outside the
support is replaced by one from the support, in proportion. If nothing is kept, the token is 0.

The mass is summed in float64. A kernel that sums in float32 may decide differently about a token if the mass above it
is within the summation error of p.
"""

import torch

from ._shared import draw_by_rejection, nucleus_threshold, top_k_threshold

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_k int32 and top_p float32 [batch_size] -> samples [batch_size] int64.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    among = probs >= top_k_threshold(probs, top_k)
    keep = among & (probs >= nucleus_threshold(probs, top_p.double().unsqueeze(-1))) & (probs > 0)
    return draw_by_rejection(probs, keep).squeeze(-1)
