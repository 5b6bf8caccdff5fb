"""Min-p sampling: one token per row, from those at least min_p times as probable as the most probable token.

Support: probs[i] >= max(probs) * min_p, with the product rounded once to float32. A token exactly at the threshold is
kept. min_p = 1 keeps the largest value and its ties, min_p <= 0 keeps every token, and min_p > 1 keeps no token of a
row that has a positive value.

Draw: in proportion to the kept probabilities, whatever the sum of the row. If nothing is kept, the token is 0. A row of
zeros keeps every token, but none can be drawn: the token is the last one, vocab_size - 1.
"""

import torch

from ._shared import draw

VOCAB_SIZE = 129280


def run(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """probs [batch_size, vocab_size] float32, min_p [batch_size] float32 -> samples [batch_size] int64.

    Draws from torch's global generator of the device.
    """
    assert probs.shape[-1] == VOCAB_SIZE
    keep = probs >= probs.amax(dim=-1, keepdim=True) * min_p.unsqueeze(-1)
    return draw(probs, keep, scaled=True).squeeze(-1)
