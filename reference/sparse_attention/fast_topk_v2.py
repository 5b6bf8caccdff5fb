"""The keys that a query of DeepSeek Sparse Attention attends to: the TOP_K with the largest scores of the indexer.

The keys of row t are columns row_starts[t] to row_starts[t] + lengths[t] - 1; their indices are relative to the start.
A row with fewer than TOP_K keys lists them all, then -1. Which of equal scores are listed, and the order, are not
defined. Scores are finite. See "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention".
"""

import torch

from ._shared import top_positions

TOP_K = 2048


def run(scores: torch.Tensor, lengths: torch.Tensor, row_starts: torch.Tensor) -> torch.Tensor:
    """scores [num_tokens, num_keys]; lengths, row_starts [num_tokens] -> topk_indices int32 [num_tokens, top_k]."""
    return top_positions(scores, lengths, row_starts, TOP_K).to(torch.int32)
