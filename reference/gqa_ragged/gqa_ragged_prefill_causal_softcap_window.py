"""Causal grouped-query attention for prefill on ragged tensors, with capped logits and a window of keys.

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale, c_hj = LOGITS_SOFT_CAP *
tanh(logit_hj / LOGITS_SOFT_CAP) (Gemma 2, 2024), p_h = softmax_j(c_hj), output_h = sum_j p_hj v_j and lse_h =
log2(sum_j exp(c_hj)).

Request b owns the queries qo_indptr[b] to qo_indptr[b + 1] - 1 and the keys and values kv_indptr[b] to kv_indptr[b + 1]
- 1. Either range may be empty.

Queries are aligned with the end of the keys: query i of a request attends to the WINDOW_SIZE keys that end with key
kv_len - q_len + i, its own. A query that may attend to no key has output 0 and lse -inf. Queries are processed in
blocks, which bounds the memory. All arithmetic is in float32. The output is rounded once, at the end, to the dtype of
q.
"""

import math

import torch

from ..gqa_paged._shared import capped, logits_of, weighted, windowed

NUM_QO_HEADS = 8
NUM_KV_HEADS = 4
HEAD_DIM = 256
LOGITS_SOFT_CAP = 50
QUERY_BLOCK = 64
WINDOW_SIZE = 4096


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [total_q, heads, dim], keys and values [total_kv, heads, dim] -> output and lse [total_q, heads]."""
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k.shape[1:] == (NUM_KV_HEADS, HEAD_DIM)
    assert v.shape[1:] == (NUM_KV_HEADS, HEAD_DIM)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for b in range(qo_indptr.shape[0] - 1):
        start, stop = qo_indptr[b : b + 2].tolist()
        first_key, end = kv_indptr[b : b + 2].tolist()
        kv_len = end - first_key
        if kv_len == 0:
            continue
        own_k, own_v = (x[first_key:end].transpose(0, 1).float() for x in (k, v))
        for first in range(start, stop, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, stop)
            logits = logits_of(q[first:last], own_k, sm_scale)
            logits = capped(logits, LOGITS_SOFT_CAP)
            last_key = torch.arange(first, last, device=q.device) - stop + kv_len
            logits = windowed(logits, last_key, WINDOW_SIZE)
            own_output, own_lse = weighted(logits, own_v, last - first)
            output[first:last] = own_output.to(output.dtype)
            lse[first:last] = own_lse
    return output, lse
