"""Keys of multi-head latent attention: the part without position of each head, and the rotated part that they share.

In prefill with expanded keys (DeepSeek-V2, arXiv 2405.04434, section 2.1), the projection gives each head a key part of
its own, and the rotated part is one for all heads. k[:, h] is k_nope[:, h] followed by k_rope[:, 0]: copies, bit for
bit.
"""

import torch

NUM_HEADS = 128
NUM_ROPE_HEADS = 1
HEAD_DIM_NOPE = 128
HEAD_DIM_KPE = 64
HEAD_DIM_QK = 192


def run(k_nope: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """k_nope [num_tokens, num_heads, head_dim_nope], k_rope [num_tokens, num_rope_heads, head_dim_kpe].

    Returns k [num_tokens, num_heads, head_dim_qk].
    """
    assert k_nope.shape[1:] == (NUM_HEADS, HEAD_DIM_NOPE)
    assert k_rope.shape[1:] == (NUM_ROPE_HEADS, HEAD_DIM_KPE)
    return torch.cat((k_nope, k_rope.expand(-1, NUM_HEADS, -1)), dim=-1)
