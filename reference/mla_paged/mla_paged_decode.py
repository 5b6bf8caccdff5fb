"""DeepSeek multi-head latent attention (MLA) for decode: one new token per request over a paged KV cache.

Every query head h of a request attends to the same latent keys, k_j = [ckv_j | kpe_j], and reads the values ckv_j:
logit_hj = (q_nope_h . ckv_j + q_pe_h . kpe_j) * sm_scale, p_h = softmax_j(logit_h), output_h = sum_j p_hj ckv_j and
lse_h = log2(sum_j exp(logit_hj)). (DeepSeek-V2, section 2.1, with the key up-projection absorbed into q_nope and the
value up-projection left to the caller.) sm_scale is that of the heads before absorption: 1/sqrt(128 + 64).

Request b owns the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order. All of them are full except the
last, which holds kv_last_page_len[b] tokens (1 to page_size). A request without pages has length 0, whatever its
kv_last_page_len says. Requests may share pages. Pages that no request names and slots after a request's last token are
never read, so they may hold NaN.
A request without keys has output 0 and lse -inf.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q_nope.
"""

import math

import torch

from ._shared import decode_logits, decoded, gather

NUM_QO_HEADS = 16
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
PAGE_SIZE = 64


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [batch_size, heads, dim] and caches [num_pages, page_size, dim] -> output and lse [batch_size, heads]."""
    assert q_nope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_CKV)
    assert q_pe.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_KPE)
    assert ckv_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_CKV)
    assert kpe_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_KPE)
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf, dtype=torch.float32, device=q_nope.device)
    pages = kv_indptr.tolist()
    last_page_len = kv_last_page_len.tolist()
    for b in range(q_nope.shape[0]):
        own_pages = kv_indices[pages[b] : pages[b + 1]]
        if own_pages.shape[0] == 0:
            continue
        kv_len = (own_pages.shape[0] - 1) * PAGE_SIZE + last_page_len[b]
        ckv, kpe = gather(ckv_cache, own_pages, kv_len), gather(kpe_cache, own_pages, kv_len)
        output[b], lse[b] = decoded(decode_logits(q_nope[b], q_pe[b], ckv, kpe, sm_scale), ckv)
    return output, lse
