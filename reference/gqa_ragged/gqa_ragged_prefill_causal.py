"""Causal grouped-query attention for prefill on ragged tensors[[LOGITS_SOFT_CAP:, with capped logits]]
[[WINDOW_SIZE:, with a window of keys]].

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale,
[[LOGITS_SOFT_CAP: capped to LOGITS_SOFT_CAP * tanh(logit_hj / LOGITS_SOFT_CAP) (Gemma 2, 2024),]]
p_h = softmax_j(logit_h), output_h = sum_j p_hj v_j and lse_h = log2(sum_j exp(logit_hj)).
The models use sm_scale = 1/sqrt(head_dim).

Request b owns the queries qo_indptr[b] to qo_indptr[b + 1] - 1 and the keys and values kv_indptr[b] to
kv_indptr[b + 1] - 1. Either range may be empty.

Queries are aligned with the end of the keys: query i of a request attends to
[[not WINDOW_SIZE: the keys j <= kv_len - q_len + i.]]
[[WINDOW_SIZE: the WINDOW_SIZE keys that end with key kv_len - q_len + i, its own.]]
A query that may attend to no key has output 0 and lse -inf. Queries are processed in blocks of
QUERY_BLOCK. All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import torch

from ..gqa_paged._shared import attend

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
QUERY_BLOCK = 64
LOGITS_SOFT_CAP = None
WINDOW_SIZE = None


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
    lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    queries, keys = qo_indptr.tolist(), kv_indptr.tolist()
    for b in range(len(queries) - 1):
        own_k, own_v = (x[keys[b] : keys[b + 1]].float() for x in (k, v))
        for start in range(queries[b], queries[b + 1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, queries[b + 1])
            last_key = start - queries[b + 1] + own_k.shape[0]
            output[start:stop], lse[start:stop] = attend(q[start:stop], own_k, own_v, sm_scale, last_key, None)
    return output, lse
