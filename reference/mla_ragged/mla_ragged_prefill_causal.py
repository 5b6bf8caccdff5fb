"""Causal DeepSeek multi-head latent attention (MLA) for prefill, with keys and values expanded from the latent.

Prefill first multiplies the latent by the up-projections, so every query head h has its own keys and values,
k_jh = [k_nope | k_pe] and v_jh (DeepSeek-V2, section 2.1; "MHA mode"): logit_hj = q_h . k_jh * sm_scale,
p_h = softmax_j(logit_h), output_h = sum_j p_hj v_jh and lse_h = log2(sum_j exp(logit_hj)). Keys have more features
(qk_dim = 128 + 64) than values (vo_dim = 128), and num_kv_heads = num_qo_heads.

Request b owns the queries qo_indptr[b] to qo_indptr[b + 1] - 1 and the keys and values kv_indptr[b] to
kv_indptr[b + 1] - 1. Either range may be empty.
Queries are aligned with the end of the keys: query i of a request attends to the keys j <= kv_len - q_len + i. A query
that may attend to no key has output 0 and lse -inf. Queries are processed in blocks of QUERY_BLOCK.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import torch

from ..gqa_paged._shared import attend

NUM_QO_HEADS = 16
NUM_KV_HEADS = 16
QK_DIM = 192
VO_DIM = 128
QUERY_BLOCK = 64


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [total_q, heads, dim], keys and values [total_kv, heads, dim] -> output and lse [total_q, heads]."""
    assert q.shape[1:] == (NUM_QO_HEADS, QK_DIM)
    assert k.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    output = torch.zeros(q.shape[0], NUM_QO_HEADS, VO_DIM, dtype=q.dtype, device=q.device)
    lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    queries, keys = qo_indptr.tolist(), kv_indptr.tolist()
    for b in range(len(queries) - 1):
        own_k, own_v = (x[keys[b] : keys[b + 1]].float() for x in (k, v))
        for start in range(queries[b], queries[b + 1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, queries[b + 1])
            last_key = start - queries[b + 1] + own_k.shape[0]
            output[start:stop], lse[start:stop] = attend(q[start:stop], own_k, own_v, sm_scale, last_key, None)
    return output, lse
