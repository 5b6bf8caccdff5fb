"""DeepSeek multi-head latent attention (MLA) for decode, with a table of pages and one cache for both parts of a key.

Every query head h of a request attends to the same latent keys, k_j = [ckv_j | kpe_j], and reads the values ckv_j:
logit_hj = (q_nope_h . ckv_j + q_pe_h . kpe_j) * sm_scale, p_h = softmax_j(logit_h), output_h = sum_j p_hj ckv_j
(DeepSeek-V2, section 2.1, with the key up-projection absorbed into q_nope and the value up-projection left to the
caller). sm_scale is that of the heads before absorption: 1/sqrt(128 + 64).

Request b has seq_lens[b] tokens, in the pages page_table[b, 0], page_table[b, 1], ... of PAGE_SIZE tokens each. Entries
of the table after the last page of a request name any pages; their tokens, and those after a request's last one, are
never read, so they may hold NaN. Requests may share pages. A request without keys has output 0.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q_nope.
"""

import math

import torch

from ..gqa_paged._shared import attend

NUM_QO_HEADS = 128
HEAD_DIM_CKV = 512
HEAD_DIM_KPE = 64
HEAD_DIM_KEY = 576
PAGE_SIZE = 128
LAST_KEY = None
LSE = None


def run(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """Queries [batch_size, heads, dim], kv_cache [num_pages, page_size, head_dim_key] -> output as q_nope.

    seq_lens [batch_size], page_table [batch_size, max_pages].
    """
    assert q_nope.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_CKV)
    assert q_pe.shape[1:] == (NUM_QO_HEADS, HEAD_DIM_KPE)
    assert kv_cache.shape[1:] == (PAGE_SIZE, HEAD_DIM_KEY)
    output = torch.zeros_like(q_nope)
    q = torch.cat((q_nope, q_pe), dim=-1)
    for b, kv_len in enumerate(seq_lens.tolist()):
        pages = page_table[b, : math.ceil(kv_len / PAGE_SIZE)]
        # The rest of the last page is cut off, not masked: it may hold NaN, and 0 * NaN is NaN.
        keys = kv_cache.index_select(0, pages).flatten(0, 1)[:kv_len, None].float()
        output[b] = attend(q[b][None], keys, keys[:, :, :HEAD_DIM_CKV], sm_scale, None, None)
    return output
