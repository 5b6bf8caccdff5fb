"""Sorts the (token, choice) pairs of a mixture of experts by expert, and pads each expert to whole blocks of rows.

A pair is numbered token * TOP_K + choice. sorted_token_ids lists the pairs of experts on other ranks (id -1) first, and
then those of experts 0, 1, ..., NUM_EXPERTS - 1. Each part that is not empty is padded to a multiple of BLOCK_SIZE with
the number of pairs, seq_len * TOP_K, which also fills the rest: the list has room for BLOCK_SIZE - 1 rows of padding in
each of the NUM_EXPERTS + 1 parts, or in as many parts as there are pairs, if these are fewer. expert_ids has the expert
of each block of BLOCK_SIZE rows (-1 for pairs of other ranks), and num_tokens_post_pad the length of all parts.

The order of pairs inside a part is not defined; here it is ascending. Blocks after num_tokens_post_pad / BLOCK_SIZE
have no expert: kernels leave their entries unwritten, here they are -1.
"""

import torch

NUM_EXPERTS = 32
TOP_K = 8
BLOCK_SIZE = 64


def run(topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_ids int32 [seq_len, top_k] -> sorted_token_ids, expert_ids and num_tokens_post_pad [1], all int32."""
    assert topk_ids.shape == (topk_ids.shape[0], TOP_K)
    device, pairs = topk_ids.device, topk_ids.numel()
    part = topk_ids.flatten() + 1
    # Without a minimum, there would be no count at all for zero tokens.
    counts = torch.bincount(part, minlength=1)
    blocks = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE
    last_block = blocks.cumsum(0)
    first_row = (last_block - blocks) * BLOCK_SIZE
    order = part.argsort(stable=True)
    sorted_part = part[order]
    first_pair = counts.cumsum(0) - counts
    row = first_row[sorted_part] + torch.arange(pairs, device=device) - first_pair[sorted_part]
    length = pairs + min(pairs, NUM_EXPERTS + 1) * (BLOCK_SIZE - 1)
    sorted_token_ids = torch.full((length,), pairs, dtype=torch.int32, device=device)
    sorted_token_ids[row] = order.to(torch.int32)
    block = torch.arange((length + BLOCK_SIZE - 1) // BLOCK_SIZE, device=device)
    expert_ids = torch.searchsorted(last_block, block, right=True) - 1
    expert_ids = torch.where(block < last_block[-1], expert_ids, -1).to(torch.int32)
    return sorted_token_ids, expert_ids, (last_block[-1:] * BLOCK_SIZE).to(torch.int32)
