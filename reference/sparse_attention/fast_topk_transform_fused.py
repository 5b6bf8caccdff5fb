"""The keys that a query of DeepSeek Sparse Attention attends to, as slots of the paged cache with pages of one token.

The keys of row t are columns row_starts[t] to row_starts[t] + lengths[t] - 1 of the indexer's scores. The slots of the
TOP_K with the largest scores come from the page table of the row's sequence, which is sequence s for rows
cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1: key j of the row is in page_table[s, j]. A row with fewer than TOP_K keys
lists them all, then -1. Which of equal scores are listed, and the order, are not defined. Scores are finite.
"""

import torch

from ._shared import top_positions

TOP_K = 2048


def run(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    row_starts: torch.Tensor,
) -> torch.Tensor:
    """scores [num_tokens, num_keys]; lengths, row_starts [num_tokens]; page_table [batch_size, max_seq_len].

    cu_seqlens_q [batch_size + 1]. Returns topk_slots int32 [num_tokens, top_k].
    """
    sequence = torch.repeat_interleave(cu_seqlens_q.diff())
    positions = top_positions(scores, lengths, row_starts, TOP_K)
    # A first column of -1 is what stands for position -1.
    slots = torch.nn.functional.pad(page_table, (1, 0), value=-1)
    return slots[sequence[:, None], positions + 1]
