"""The pages of each request's keys, a row for each request, as FlashMLA and other paged attention take them.

Row r of req_to_token has the slots of request r's tokens in order; slot s is in page s // PAGE_SIZE. Pages hold
PAGE_SIZE consecutive tokens each, so the first token of a page tells which it is. Request i has paged_kernel_lens[i]
keys. Entries of kv_indices after a request's last page stay.
"""

import torch

PAGE_SIZE = 64


def run(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    paged_kernel_lens: torch.Tensor,
    kv_indices: torch.Tensor,
) -> torch.Tensor:
    """req_to_token int32 [num_reqs, max_context]; req_pool_indices int64 and paged_kernel_lens int32 [batch_size];
    kv_indices int32 [batch_size, max_pages].

    Returns kv_indices_out, of the shape of kv_indices.
    """
    first = torch.arange(kv_indices.shape[1], device=kv_indices.device) * PAGE_SIZE
    slots = req_to_token[req_pool_indices[:, None], first.clamp_max(req_to_token.shape[1] - 1)]
    return torch.where(first < paged_kernel_lens[:, None], slots // PAGE_SIZE, kv_indices)
