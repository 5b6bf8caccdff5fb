"""The slots of the keys that each request attends to, one request after the other, as FlashInfer's wrappers take them.

Row r of req_to_token has the slots of request r's tokens in order. Request i attends to kv_indptr[i + 1] - kv_indptr[i]
of its tokens, from kv_start_idx[i] on, which is not 0 where a window hides the first ones. Entries of kv_indices after
the last key stay.
"""

import torch


def run(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_start_idx: torch.Tensor,
    kv_indices: torch.Tensor,
) -> torch.Tensor:
    """req_to_token int32 [num_reqs, max_context]; req_pool_indices int64 [batch_size]; kv_indptr int32 [len_indptr],
    starting with 0; kv_start_idx int32 [batch_size]; kv_indices int32 [num_kv_indices].

    Returns kv_indices_out, of the shape of kv_indices.
    """
    request = torch.repeat_interleave(kv_indptr.diff())
    position = torch.arange(len(request), device=request.device) + (kv_start_idx - kv_indptr[:-1])[request]
    found = kv_indices.clone()
    found[: len(request)] = req_to_token[req_pool_indices[request], position]
    return found
