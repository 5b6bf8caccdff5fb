"""Top-p (nucleus) sampling: one token of each row, among the most probable ones whose mass reaches p, in proportion.

Support: token i is kept if the mass of the tokens strictly more probable than it is less than p and probs[i] > 0. In
descending order, the token that reaches p is the last one, also when the mass reaches p exactly; all tokens tied with
it are kept. p is absolute mass, not a share of the row's sum. p > 1 keeps every token of positive probability of a row
that sums to 1, p = 1 too but for rounding; p <= 0 keeps none.

Draw: rows sum to 1. The kernels sample by rejection and do not scale the first draw by the row's sum: of a row that
sums to more than 1, the first draw reaches only the tokens whose cumulative mass, in order of index, begins below 1; of
one that sums to less, the missing mass falls to its last token of positive probability. A first draw outside the
support is drawn again from the support, in proportion. Where nothing is kept (p <= 0, a row of zeros) the token is 0.

The mass is summed in float64; a kernel that sums in float32 may decide differently for a token whose mass above lies
within its summation error of p.
"""

import torch

from ._shared import draw_by_rejection, nucleus_threshold

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, top_p [batch_size] float32 -> samples [batch_size] int32.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    keep = (probs >= nucleus_threshold(probs, top_p.double().unsqueeze(-1))) & (probs > 0)
    return draw_by_rejection(probs, keep).squeeze(-1).to(torch.int32)
