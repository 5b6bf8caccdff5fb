"""Splits what comes out of a gated delta net's short convolution into queries, keys and values: copies, bit for bit.

A token's features are the queries of all key heads, then their keys, then the values of all value heads.
"""

import torch

NUM_K_HEADS = 4
NUM_V_HEADS = 8
HEAD_SIZE = 128
QKV_SIZE = 2048


def run(mixed_qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """mixed_qkv [num_tokens, qkv_size] -> q, k [num_tokens, num_k_heads, head_size], v [total_tokens, num_v_heads,
    head_size]."""
    assert mixed_qkv.shape[1] == QKV_SIZE
    heads = mixed_qkv.unflatten(1, (2 * NUM_K_HEADS + NUM_V_HEADS, HEAD_SIZE))
    q, k, v = heads.split([NUM_K_HEADS, NUM_K_HEADS, NUM_V_HEADS], dim=1)
    return q.clone(), k.clone(), v.clone()
