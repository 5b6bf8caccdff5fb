"""Rotary position embedding of query and key from the cosines and sines of each token, which rotate halves of a head.

The half turn r(x)[i] is -x[i + HEAD_SIZE / 2] for the first half of the features and x[i - HEAD_SIZE / 2] for the
second. y = x * cos + r(x) * sin, in float32 and rounded once (RoFormer, https://arxiv.org/abs/2104.09864, in the order
of features of GPT-NeoX). Models give both features of a pair the same cosine and the same sine, which are then a
rotation; the function does not depend on it. It is how models of the transformers library apply it.
"""

import torch

NUM_QO_HEADS = 8
NUM_KV_HEADS = 4
HEAD_SIZE = 256


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [heads, tokens, features], cos and sin [tokens, features] -> like x; products are float32."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned.float() * sin).to(torch.bfloat16)


def run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q [num_qo_heads, num_tokens, head_size], k likewise, cos and sin [num_tokens, head_size], all bfloat16.

    Returns q_out and k_out, like q and k.
    """
    assert q.shape[::2] == (NUM_QO_HEADS, HEAD_SIZE)
    assert k.shape[::2] == (NUM_KV_HEADS, HEAD_SIZE)
    assert cos.shape[1] == sin.shape[1] == HEAD_SIZE
    return rotated(q, cos, sin), rotated(k, cos, sin)
