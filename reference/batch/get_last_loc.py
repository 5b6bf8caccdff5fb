"""The slot of the last cached token of each request, where the allocator goes on in its page.

Row r of req_to_token has the slots of request r's tokens in order. A request without cached tokens has -1.
"""

import torch


def run(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """req_to_token int32 [num_reqs, max_context]; req_pool_indices, prefix_lens int64 [batch_size].

    Returns last_loc int64 [batch_size].
    """
    last = req_to_token[req_pool_indices, prefix_lens - 1]
    return torch.where(prefix_lens > 0, last, -1).to(torch.int64)
