"""Top-p (nucleus) sampling: one token per row, from the most probable tokens whose mass reaches p, in proportion.

Support: token i is kept if the mass of the strictly more probable tokens is less than p and probs[i] > 0. In descending
order, the token with which the mass reaches or exceeds p is the last one kept, together with all tokens tied with it. p
is absolute mass, not a share of the row's sum. In a row that sums to 1, p > 1 keeps every token with a positive
probability; so does p = 1, except for rounding. p <= 0 keeps none.

Draw: rows should sum to 1. The kernels sample by rejection and do not scale the first draw by the sum of the row. If a
row sums to more than 1, the first draw reaches only tokens whose cumulative mass, in order of index, begins below 1; if
it sums to less, the missing mass goes to the last token with a positive probability. A first draw outside the support
is replaced by one from the support, in proportion. If nothing is kept (p <= 0, a row of zeros), the token is 0.

The mass is summed in float64. A kernel that sums in float32 may decide differently about a token if the mass above it
is within the summation error of p.
"""

import torch

from ._shared import draw_by_rejection, nucleus_threshold

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_p [batch_size] float32 -> samples [batch_size] int64.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    keep = (probs >= nucleus_threshold(probs, top_p.double().unsqueeze(-1))) & (probs > 0)
    return draw_by_rejection(probs, keep).squeeze(-1)
