"""The slots of the new tokens of a prefill in a cache with pages of PAGE_SIZE tokens, one request after the other.

Request i has prefix_lens[i] cached tokens and seq_lens[i] tokens with the new ones. These first fill the page of its
last cached token, whose slot is last_loc[i]; a request whose prefix fills whole pages does not read it. Then they take
pages from free_pages, in order, those of the first request first. Slot s is in page s // PAGE_SIZE. There are as many
free pages as are taken, at least. Entries of out_indices after the last new token stay.
"""

import torch

PAGE_SIZE = 64


def run(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
) -> torch.Tensor:
    """prefix_lens, seq_lens, last_loc int64 [batch_size]; free_pages int64 [num_free];
    out_indices int64 [num_tokens].

    Returns out_indices_out, of the shape of out_indices.
    """
    new_lens = seq_lens - prefix_lens
    request = torch.repeat_interleave(new_lens)
    start = new_lens.cumsum(0) - new_lens
    position = torch.arange(len(request), device=request.device) + (prefix_lens - start)[request]
    old_pages, pages = ((lens + PAGE_SIZE - 1) // PAGE_SIZE for lens in (prefix_lens, seq_lens))
    # Where the pages of a request begin among the free ones, if it had taken its old pages from there as well.
    before = (pages - old_pages).cumsum(0) - pages
    slots = position + (last_loc + 1 - prefix_lens)[request]
    new = position >= (old_pages * PAGE_SIZE)[request]
    slots[new] = free_pages[(position // PAGE_SIZE + before[request])[new]] * PAGE_SIZE + position[new] % PAGE_SIZE
    out = out_indices.clone()
    out[: len(request)] = slots
    return out
