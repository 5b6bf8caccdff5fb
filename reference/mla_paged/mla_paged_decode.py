"""DeepSeek multi-head latent attention (MLA) for decode: one new token per request over a paged KV cache.

Every query head h of a request attends to the same latent keys, k_j = [ckv_j | kpe_j], and reads the values ckv_j:
logit_hj = (q_nope_h . ckv_j + q_pe_h . kpe_j) * sm_scale, p_h = softmax_j(logit_h), output_h = sum_j p_hj ckv_j and
lse_h = log2(sum_j exp(logit_hj)). (DeepSeek-V2, section 2.1, with the key up-projection absorbed into q_nope and the
value up-projection left to the caller.) sm_scale is that of the heads before absorption: 1/sqrt(128 + 64).

Request b owns the pages kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order.
[[KV_LAST_PAGE_LEN: All of them are full except the last, which holds kv_last_page_len[b] tokens (1 to PAGE_SIZE). A
request without pages has length 0, whatever its kv_last_page_len says.]]
[[not KV_LAST_PAGE_LEN: Each holds one token.]]
Requests may share pages. Pages that no request names and slots after a request's last token are never read, so they may
hold NaN. A request without keys has output 0 and lse -inf.

All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q_nope.
"""

import torch

from ..gqa_paged._shared import attend

NUM_QO_HEADS = 16
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
PAGE_SIZE = 64
KV_LAST_PAGE_LEN = True
LAST_KEY = None


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [batch_size, heads, dim] and caches [num_pages, page_size, dim] -> output and lse [batch_size, heads]."""
    assert q_nope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_CKV)
    assert q_pe.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_KPE)
    assert ckv_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_CKV)
    assert kpe_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_KPE)
    output = torch.zeros_like(q_nope)
    lse = torch.zeros(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
    q = torch.cat((q_nope, q_pe), dim=-1)
    pages = kv_indptr.tolist()
    if kv_last_page_len is not None:
        last_page_len = kv_last_page_len.tolist()
    for b in range(q.shape[0]):
        own_pages = kv_indices[pages[b] : pages[b + 1]]
        keys = torch.cat([cache.index_select(0, own_pages).float() for cache in (ckv_cache, kpe_cache)], dim=-1)
        keys = keys.flatten(0, 1)
        if kv_last_page_len is not None:
            # The rest of the last page is cut off, not masked: it may hold NaN, and 0 * NaN is NaN.
            keys = keys[: (own_pages.shape[0] - 1) * PAGE_SIZE + last_page_len[b]]
        keys, values = keys[:, None], keys[:, None, :HEAD_DIM_CKV]
        output[b], lse[b] = attend(q[b][None], keys, values, sm_scale, None, None)
    return output, lse
