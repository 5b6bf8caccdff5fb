"""Queries of multi-head latent attention with absorbed weights: the latent part and the rotated part of each head.

Decoding multiplies queries by the keys' up-projection, so they meet the compressed keys themselves (DeepSeek-V2,
arXiv 2405.04434, section 2.1). q[:, h] is q_nope[:, h] followed by q_rope[:, h]: copies, bit for bit.
"""

import torch

NUM_HEADS = 128
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
HEAD_DIM_Q = 576


def run(q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
    """q_nope [num_tokens, num_heads, head_dim_ckv], q_rope [num_tokens, num_heads, head_dim_kpe].

    Returns q [num_tokens, num_heads, head_dim_q].
    """
    assert q_nope.shape[1:] == (NUM_HEADS, HEAD_DIM_CKV)
    assert q_rope.shape[1:] == (NUM_HEADS, HEAD_DIM_KPE)
    return torch.cat((q_nope, q_rope), dim=-1)
