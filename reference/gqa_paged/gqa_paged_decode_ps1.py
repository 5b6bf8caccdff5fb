"""Grouped-query attention for decode: one new token per request over a paged KV cache with one token per page.

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale, p_h = softmax_j(logit_h),
output_h = sum_j p_hj v_j and lse_h = log2(sum_j exp(logit_hj)). The models use sm_scale = 1/sqrt(head_dim).

Request b owns the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]] of the cache, one token each, in this order.
Requests may share pages. Pages that no request names are never read, so they may hold NaN.
A request without keys has output 0 and lse -inf.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import math

import torch

from ._shared import decode_logits, decoded, gather

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
PAGE_SIZE = 1


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch_size, heads, dim], caches [num_pages, page_size, heads, dim] -> output and lse [batch_size, heads]."""
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    assert v_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    pages = kv_indptr.tolist()
    for b in range(q.shape[0]):
        own_pages = kv_indices[pages[b] : pages[b + 1]]
        kv_len = own_pages.shape[0]
        if kv_len == 0:
            continue
        k, v = gather(k_cache, own_pages, kv_len), gather(v_cache, own_pages, kv_len)
        output[b], lse[b] = decoded(decode_logits(q[b], k, sm_scale), v)
    return output, lse
