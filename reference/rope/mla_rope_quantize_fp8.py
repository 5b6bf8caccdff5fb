"""Rotary position embedding of latent attention's queries and keys, and fp8 (e4m3) codes of all of their parts.

Features 2 i and 2 i + 1 of a rotated part are a pair (x, y) that becomes (x cos - y sin, y cos + x sin), as in
DeepSeek-V3; row p of the cache has the cosines of position p, then the sines. Queries are multiplied by quant_scale_q
and keys by quant_scale_kv. Products and sums are in float32; the one rounding is that to e4m3, to nearest with ties to
even, and what is beyond 448 becomes 448.
"""

import torch

NUM_QO_HEADS = 128
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
LARGEST = 448.0


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., head_dim_kpe], each pair turned, in float32 as cos and sin are, [..., head_dim_kpe / 2]."""
    first, second = x.unflatten(-1, (HEAD_DIM_KPE // 2, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)


def encoded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The codes of x * scale."""
    return (x.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def run(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor,
    k_nope: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    quant_scale_q: float,
    quant_scale_kv: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_rope, q_nope [num_tokens, num_qo_heads, head_dim]; k_rope, k_nope [num_tokens, head_dim].

    cos_sin_cache [max_seq_len, head_dim_kpe], pos_ids [num_tokens]. Returns the codes of q_rope, k_rope, q_nope and
    k_nope, with their shapes.
    """
    assert q_rope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_KPE)
    assert q_nope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_CKV)
    assert k_rope.shape[1] == cos_sin_cache.shape[1] == HEAD_DIM_KPE
    assert k_nope.shape[1] == HEAD_DIM_CKV
    cos, sin = cos_sin_cache[pos_ids].chunk(2, dim=-1)
    q_turned = rotated(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
    return (
        encoded(q_turned, quant_scale_q),
        encoded(rotated(k_rope, cos, sin), quant_scale_kv),
        encoded(q_nope, quant_scale_q),
        encoded(k_nope, quant_scale_kv),
    )
