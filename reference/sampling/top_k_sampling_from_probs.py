"""Top-k sampling: one token per row, from its k most probable tokens, in proportion to their probabilities.

Support: token i is kept if fewer than k tokens are strictly more probable and probs[i] > 0. All tokens tied with the
k-th are therefore kept, and the support may be larger than k. k >= vocab_size and k < 0 (read as unsigned) keep every
token with a positive probability; k = 0 keeps none.

Draw: rows should sum to 1. The kernels sample by rejection and do not scale the first draw by the sum of the row. If a
row sums to more than 1, the first draw reaches only tokens whose cumulative mass, in order of index, begins below 1; if
it sums to less, the missing mass goes to the last token with a positive probability. A first draw outside the support
is replaced by one from the support, in proportion. If nothing is kept (k = 0, a row of zeros), the token is 0.
"""

import torch

from ._shared import draw_by_rejection, top_k_threshold

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_k [batch_size] int32 -> samples [batch_size] int64.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    keep = (probs >= top_k_threshold(probs, top_k)) & (probs > 0)
    return draw_by_rejection(probs, keep).squeeze(-1)
