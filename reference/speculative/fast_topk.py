"""The TOP_K most probable tokens of each row; a draft model grows its tree from them (EAGLE-2, arXiv 2406.16858).

Values descend along a row and are copies. Which of equal values come first, or at all, is not defined; here it is those
with the smaller index.
"""

import torch

TOP_K = 4
VOCAB_SIZE = 129280


def run(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [num_rows, vocab_size] -> topk_values and their places topk_indices (int64), both [num_rows, top_k]."""
    assert values.shape[1] == VOCAB_SIZE
    best = values.argsort(descending=True, stable=True)[:, :TOP_K].contiguous()
    return values.gather(1, best), best
