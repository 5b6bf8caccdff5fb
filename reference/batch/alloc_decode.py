"""The slot of the token that each request decodes, in a cache with pages of PAGE_SIZE tokens.

Request i has seq_lens[i] tokens with the new one, so it has one at least. The new token follows the slot of the one
before, last_loc[i], unless that page is full: then it takes the first slot of a page from free_pages, in order, the
first request that needs one first. Slot s is in page s // PAGE_SIZE. There are as many free pages as are taken, at
least.
"""

import torch

PAGE_SIZE = 64


def run(seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor) -> torch.Tensor:
    """seq_lens, last_loc int64 [batch_size]; free_pages int64 [num_free] -> out_indices int64 [batch_size]."""
    full = seq_lens % PAGE_SIZE == 1
    slots = last_loc + 1
    slots[full] = free_pages[: full.sum()] * PAGE_SIZE
    return slots
