"""Causal grouped-query attention for prefill: several new tokens per request over a paged KV cache, one token per page.

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale, p_h = softmax_j(logit_h),
output_h = sum_j p_hj v_j and lse_h = log2(sum_j exp(logit_hj)). The models use sm_scale = 1/sqrt(head_dim).

Request b owns the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]] of the cache, one token each, in this order.
Requests may share pages. Pages that no request names are never read, so they may hold NaN.
Queries are aligned with the end of the keys: query i of a request attends to the keys j <= kv_len - q_len + i. A query
that may attend to no key has output 0 and lse -inf. Queries are processed in blocks whose logits fit in 128 MiB.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import math

import torch

from ._shared import attend, gather

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
PAGE_SIZE = 1


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [total_q, heads, dim], caches [num_pages, page_size, heads, dim] -> output and lse [total_q, heads]."""
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    assert v_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    pages = kv_indptr.tolist()
    queries = qo_indptr.tolist()
    for b in range(len(queries) - 1):
        own_pages = kv_indices[pages[b] : pages[b + 1]]
        kv_len = own_pages.shape[0]
        if kv_len == 0:
            continue
        k, v = gather(k_cache, own_pages, kv_len), gather(v_cache, own_pages, kv_len)
        block = max(1, 2**25 // (NUM_QO_HEADS * kv_len))
        for start in range(queries[b], queries[b + 1], block):
            stop = min(start + block, queries[b + 1])
            last_key = torch.arange(start, stop, device=k.device) - queries[b + 1] + kv_len
            own_output, own_lse = attend(q[start:stop], k, v, sm_scale, last_key)
            output[start:stop] = own_output.to(output.dtype)
            lse[start:stop] = own_lse
    return output, lse
