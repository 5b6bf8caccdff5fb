"""Grouped-query attention for decode over a paged KV cache[[K_SCALE: in fp8]][[SINKS:, with sinks]]
[[LOGITS_SOFT_CAP:, with capped logits]][[WINDOW_SIZE:, with a window of keys]].

[[K_SCALE: Keys are k_scale times the codes in k_cache, values v_scale times those in v_cache.]]
Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale,
[[LOGITS_SOFT_CAP: capped to LOGITS_SOFT_CAP * tanh(logit_hj / LOGITS_SOFT_CAP) (Gemma 2, 2024),]]
[[not SINKS: p_h = softmax_j(logit_h), output_h = sum_j p_hj v_j and lse_h = log2(sum_j exp(logit_hj)).]]
[[SINKS: p_hj = exp(logit_hj) / (exp(sink_h) + sum_j exp(logit_hj)): the sink of a head is the logit of a key whose
value is zero (gpt-oss, 2025). output_h = sum_j p_hj v_j and lse_h = log2(exp(sink_h) + sum_j exp(logit_hj)).]]
The models use sm_scale = 1/sqrt(head_dim).

Request b has one query and owns the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order.
[[KV_LAST_PAGE_LEN: All of them are full except the last, which holds kv_last_page_len[b] tokens (1 to PAGE_SIZE). A
request without pages has length 0, whatever its kv_last_page_len says.]]
[[not KV_LAST_PAGE_LEN: Each holds one token.]]
Requests may share pages. Pages that no request names and slots after a request's last token are never read, so they may
hold NaN.

[[WINDOW_SIZE: The query attends to the last WINDOW_SIZE keys of its request, or to all if there are fewer.]]
A request without keys has output 0 and lse [[SINKS: sink_h * log2(e)]][[not SINKS: -inf]]. All arithmetic is in
float32. The output is rounded once, at the end, to the dtype of q.
"""

import torch

from ._shared import attend, gather

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
HEAD_DIM = 128
PAGE_SIZE = 64
LOGITS_SOFT_CAP = None
WINDOW_SIZE = None
SINKS = None
KV_LAST_PAGE_LEN = True
K_SCALE = None
V_SCALE = None
LAST_KEY = None


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: float | None,
    v_scale: float | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch_size, heads, dim], caches [num_pages, page_size, heads, dim] -> output and lse [batch_size, heads].

    [[SINKS: sinks [num_qo_heads], float32.]]
    """
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert k_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    assert v_cache.shape[1:] == (PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    if sinks is not None:
        assert sinks.shape == (NUM_QO_HEADS,)
    output = torch.zeros_like(q)
    lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    pages = kv_indptr.tolist()
    if kv_last_page_len is not None:
        last_page_len = kv_last_page_len.tolist()
    for b in range(q.shape[0]):
        own_pages = kv_indices[pages[b] : pages[b + 1]]
        k, v = gather(k_cache, own_pages), gather(v_cache, own_pages)
        if kv_last_page_len is not None:
            # The rest of the last page is cut off, not masked: it may hold NaN, and 0 * NaN is NaN.
            kv_len = (own_pages.shape[0] - 1) * PAGE_SIZE + last_page_len[b]
            k, v = k[:kv_len], v[:kv_len]
        if WINDOW_SIZE is not None:
            k, v = k[-WINDOW_SIZE:], v[-WINDOW_SIZE:]
        if k_scale is not None:
            k, v = k * k_scale, v * v_scale
        output[b], lse[b] = attend(q[b][None], k, v, sm_scale, None, sinks)
    return output, lse
