"""Grouped-query attention for decode, with a window of keys.

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale, p_h = softmax_j(logit_hj),
output_h = sum_j p_hj v_j and lse_h = log2(sum_j exp(logit_hj)).

Request b owns the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order. All of them are full except the
last, which holds kv_last_page_len[b] tokens (1 to PAGE_SIZE). A request without pages has length 0, whatever its
kv_last_page_len says. Requests may share pages. Pages that no request names and slots after a request's last token are
never read, so they may hold NaN.

The query attends to the last WINDOW_SIZE keys of its request, or to all if there are fewer. A request without keys has
output 0 and lse -inf. All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import math

import torch

from ._shared import decode_logits, decoded, gather, requests_with_keys

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
PAGE_SIZE = 64
WINDOW_SIZE = 4096


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch_size, heads, dim], caches [num_pages, page_size, heads, dim] -> output and lse [batch_size, heads]."""
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    assert v_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for b, first_page, end, kv_len in requests_with_keys(kv_indptr, kv_last_page_len, PAGE_SIZE):
        own_pages = kv_indices[first_page:end]
        k, v = gather(k_cache, own_pages, kv_len), gather(v_cache, own_pages, kv_len)
        k, v = k[:, -WINDOW_SIZE:], v[:, -WINDOW_SIZE:]
        logits = decode_logits(q[b], k, sm_scale)
        output[b], lse[b] = decoded(logits, v)
    return output, lse
