"""The keys that a query of DeepSeek Sparse Attention attends to, as rows of the concatenated keys of all sequences.

The keys of row t are columns row_starts[t] to row_starts[t] + lengths[t] - 1 of the indexer's scores. Those of the
TOP_K largest are listed relative to the start, plus topk_indices_offset[t], which is where the keys of the row's
sequence begin. A row with fewer than TOP_K keys lists them all, then -1. Which of equal scores are listed, and the
order, are not defined. Scores are finite.
"""

import torch

from ._shared import top_positions

TOP_K = 2048


def run(
    scores: torch.Tensor, lengths: torch.Tensor, topk_indices_offset: torch.Tensor, row_starts: torch.Tensor
) -> torch.Tensor:
    """scores [num_tokens, num_keys]; lengths, topk_indices_offset, row_starts [num_tokens].

    Returns topk_rows int32 [num_tokens, top_k].
    """
    positions = top_positions(scores, lengths, row_starts, TOP_K)
    return (positions + torch.where(positions < 0, 0, topk_indices_offset[:, None])).to(torch.int32)
