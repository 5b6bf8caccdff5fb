"""Writes keys and values of new tokens into the slots of a cache that they were given: copies, bit for bit.

Row i of k goes to row indices[i] of k_cache, and that of v to v_cache; all other rows stay. Indices are distinct. A row
is one token: the features of all heads of a rank.
"""

import torch

ROW_DIM = 1024


def run(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [num_tokens, row_dim]; k_cache, v_cache [num_slots, row_dim]; indices [num_tokens].

    Returns k_cache_out and v_cache_out [num_slots, row_dim].
    """
    assert k.shape[1] == v.shape[1] == ROW_DIM
    assert k_cache.shape[1] == v_cache.shape[1] == ROW_DIM
    return k_cache.index_copy(0, indices, k), v_cache.index_copy(0, indices, v)
