"""Writes the slots of a prefill's tokens into the table that has a row for each request: copies.

Row req_pool_indices[i] of the table gets the prefix_lens[i] slots of request i's cached prefix, then those of its
seq_lens[i] - prefix_lens[i] new tokens. prefix_indices and out_cache_loc list them, one request after the other. Rows
are distinct. Everything else in the table stays.
"""

import torch


def run(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
) -> torch.Tensor:
    """req_to_token int32 [num_reqs, max_context]; req_pool_indices, prefix_lens, seq_lens int64 [batch_size];
    prefix_indices int64 [num_prefix_tokens]; out_cache_loc int64 [num_tokens].

    Returns req_to_token_out, of the shape of req_to_token.
    """
    request = torch.repeat_interleave(seq_lens)
    start = seq_lens.cumsum(0) - seq_lens
    position = torch.arange(len(request), device=request.device) - start[request]
    cached = position < prefix_lens[request]
    slots = position.clone()
    slots[cached], slots[~cached] = prefix_indices, out_cache_loc
    table = req_to_token.clone()
    table[req_pool_indices[request], position] = slots.to(torch.int32)
    return table
