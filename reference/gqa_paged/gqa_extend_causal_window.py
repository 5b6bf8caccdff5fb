"""Causal grouped-query attention for prefill after a cached prefix, with a window of keys.

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale, p_h = softmax_j(logit_h) and
output_h = sum_j p_hj v_j.

Request b has the new tokens qo_indptr[b] to qo_indptr[b + 1] - 1, each with a query, a key and a value. Before them are
its cached tokens, in the slots kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order; there may be none, and
requests may share them. Slots that no request names are never read, so they may hold NaN. A query attends to the
WINDOW_SIZE keys that end with its own, fewer if its request has fewer before it.

Queries are processed in blocks, which bounds the memory. All arithmetic is in float32. The output is rounded once, at
the end, to the dtype of q.
"""

import math

import torch

from ._shared import extended, logits_of, of_queries

NUM_QO_HEADS = 8
NUM_KV_HEADS = 4
QK_DIM = 256
VO_DIM = 256
QUERY_BLOCK = 64
WINDOW_SIZE = 1024


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """New tokens [total_q, heads, dim], cached ones [num_slots, heads, dim] -> output [total_q, heads, vo_dim]."""
    assert q.shape[1:] == (NUM_QO_HEADS, QK_DIM)
    assert k.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    assert k_buffer.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v_buffer.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    output = torch.zeros(q.shape[0], NUM_QO_HEADS, VO_DIM, dtype=q.dtype, device=q.device)
    cached = kv_indptr.tolist()
    for b in range(qo_indptr.shape[0] - 1):
        start, stop = qo_indptr[b : b + 2].tolist()
        slots = kv_indices[cached[b] : cached[b + 1]]
        keys, values = extended(k_buffer, slots, k[start:stop]), extended(v_buffer, slots, v[start:stop])
        for first in range(start, stop, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, stop)
            logits = logits_of(q[first:last], keys, sm_scale)
            last_key = torch.arange(first, last, device=q.device) - stop + keys.shape[1]
            last_key = last_key.repeat_interleave(NUM_QO_HEADS // NUM_KV_HEADS)[:, None]
            position = torch.arange(keys.shape[1], device=q.device)
            logits = logits.masked_fill((position > last_key) | (position <= last_key - WINDOW_SIZE), -math.inf)
            weights = torch.softmax(logits, dim=2)
            output[first:last] = of_queries(weights @ values, last - first)
    return output
