"""Rotary position embedding (Su et al., 2021) of queries and keys in NeoX style; keys and values also go to a cache.

Feature i of the first half of a head and feature i of its second half form the pair (x, y), which is rotated by the
i-th angle of the token's position: (x cos - y sin, y cos + x sin). Row p of cos_sin_cache holds the HEAD_SIZE / 2
cosines of position p, then its sines. They are used as they are, so a scale in them (YaRN) scales the result. Computed
in float32 and rounded once, at the end. The rotated keys of token i, all heads in a row, go to row out_loc[i] of
k_cache, and its values, as they are, to that of v_cache; all other rows stay. The entries of out_loc are distinct.
"""

import torch

NUM_QO_HEADS = 32
NUM_KV_HEADS = 4
HEAD_SIZE = 128
ROW_DIM = 512


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """states [num_tokens, heads, head_size]; cos, sin [num_tokens, 1, head_size / 2] -> rotated, as states."""
    x, y = states.float().chunk(2, dim=-1)
    return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1).to(states.dtype)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    out_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [num_tokens, num_qo_heads, head_size], k [num_tokens, num_kv_heads, head_size], v [num_tokens, row_dim].

    k_cache, v_cache [num_slots, row_dim]; cos_sin_cache [max_seq_len, head_size] float32; positions and out_loc
    [num_tokens] int64. Returns q_out, k_out, k_cache_out and v_cache_out, with the shapes of q, k and the caches.
    """
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_SIZE)
    assert k.shape[1:] == (NUM_KV_HEADS, HEAD_SIZE)
    assert v.shape[1] == k_cache.shape[1] == v_cache.shape[1] == ROW_DIM
    assert cos_sin_cache.shape[1] == HEAD_SIZE
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    k_out = rotate(k, cos, sin)
    k_cache_out = k_cache.index_copy(0, out_loc, k_out.flatten(1))
    return rotate(q, cos, sin), k_out, k_cache_out, v_cache.index_copy(0, out_loc, v)
