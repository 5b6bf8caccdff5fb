"""Rotary position embedding (Su et al., 2021) of queries and keys, from a cache of cosines and sines, in NeoX style.

The numbers of heads are those of q and k. The first ROTARY_DIM features of each head are rotated; the others are
copied. Feature i of the first half of these and feature i of their second half form the pair (x, y), which is rotated
by the i-th angle of the token's position: (x cos - y sin, y cos + x sin). Row p of the cache holds the ROTARY_DIM / 2
cosines of position p, then its sines. They are used as they are, so a scale in them (YaRN) scales the result. Computed
in float32 and rounded once, at the end.
"""

import torch

HEAD_SIZE = 128
ROTARY_DIM = 64


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """states [num_tokens, heads, head_size]; cos, sin [num_tokens, 1, rotary_dim / 2] -> rotated, as states."""
    x, y = states[..., :ROTARY_DIM].float().chunk(2, dim=-1)
    rotated = torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1).to(states.dtype)
    return torch.cat((rotated, states[..., ROTARY_DIM:]), dim=-1)


def run(
    q: torch.Tensor, k: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [num_tokens, num_qo_heads, head_size], k [num_tokens, num_kv_heads, head_size] -> (q_out, k_out), same shapes.

    cos_sin_cache [max_seq_len, rotary_dim] float32; positions [num_tokens] int64, each below max_seq_len.
    """
    assert q.shape[-1] == HEAD_SIZE
    assert k.shape[-1] == HEAD_SIZE
    assert cos_sin_cache.shape[-1] == ROTARY_DIM
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    return rotate(q, cos, sin), rotate(k, cos, sin)
