"""Writes the compressed keys of new tokens into the slots of a cache that they were given: copies, bit for bit.

Row loc[i] becomes cache_k_nope[i], the compressed part of latent attention (DeepSeek-V2, arXiv 2405.04434),
followed by cache_k_rope[i], the rotated part; all other rows stay. Slots are distinct.
"""

import torch

HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
HEAD_DIM_KEY = 576


def run(
    kv_buffer: torch.Tensor, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
) -> torch.Tensor:
    """kv_buffer [num_slots, head_dim_key], loc [num_tokens], cache_k_nope, cache_k_rope [num_tokens, head_dim].

    Returns kv_buffer_out [num_slots, head_dim_key].
    """
    assert kv_buffer.shape[1] == HEAD_DIM_KEY
    assert cache_k_nope.shape[1] == HEAD_DIM_CKV
    assert cache_k_rope.shape[1] == HEAD_DIM_KPE
    return kv_buffer.index_copy(0, loc, torch.cat((cache_k_nope, cache_k_rope), dim=1))
