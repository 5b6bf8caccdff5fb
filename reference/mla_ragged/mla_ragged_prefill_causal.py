"""Causal DeepSeek multi-head latent attention (MLA) for prefill, with keys and values expanded from the latent.

Prefill first multiplies the latent by the up-projections, so that every query head h has its own keys and values,
k_jh = [k_nope | k_pe] and v_jh (DeepSeek-V2, section 2.1; "MHA mode"): logit_hj = q_h . k_jh * sm_scale,
p_h = softmax_j(logit_h), output_h = sum_j p_hj v_jh and lse_h = log2(sum_j exp(logit_hj)). Keys have more features
(qk_dim = 128 + 64) than values (vo_dim = 128), and num_kv_heads = num_qo_heads.

Request b owns the queries qo_indptr[b] to qo_indptr[b + 1] - 1 and the keys and values kv_indptr[b] to
kv_indptr[b + 1] - 1. Either range may be empty.
Queries are aligned with the end of the keys: query i of a request attends to the keys j <= kv_len - q_len + i. A query
that may attend to no key has output 0 and lse -inf. Queries are processed in blocks whose logits fit in 128 MiB.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import math

import torch

NUM_QO_HEADS = 16
NUM_KV_HEADS = 16
QK_DIM = 192
VO_DIM = 128


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, last_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries q [heads, queries, qk_dim] of one request to its k and v [heads, kv_len, dim].

    last_key [queries] is the last key that each query may attend to (negative: no key). kv_len >= 1.
    Returns output [heads, queries, vo_dim] and lse [heads, queries], base 2, both float32.
    """
    hidden = torch.arange(k.shape[1], device=k.device) > last_key[:, None]
    logits = (q @ k.transpose(1, 2) * sm_scale).masked_fill(hidden, -math.inf)
    # The maximum of a row without keys is -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
    maximum = logits.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=-1, keepdim=True)
    output = (weights @ v) / torch.where(total > 0, total, 1.0)
    lse = (maximum + torch.log(total)) * math.log2(math.e)
    return output, lse.squeeze(-1)


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
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    queries, keys = qo_indptr.tolist(), kv_indptr.tolist()
    for b in range(len(queries) - 1):
        kv_len = keys[b + 1] - keys[b]
        if kv_len == 0:
            continue
        own_k, own_v = (x[keys[b] : keys[b + 1]].transpose(0, 1).float() for x in (k, v))
        block = max(1, 2**25 // (NUM_QO_HEADS * kv_len))
        for start in range(queries[b], queries[b + 1], block):
            stop = min(start + block, queries[b + 1])
            last_key = torch.arange(start, stop, device=k.device) - queries[b + 1] + kv_len
            own_q = q[start:stop].transpose(0, 1).float()
            own_output, own_lse = attend(own_q, own_k, own_v, sm_scale, last_key)
            output[start:stop] = own_output.transpose(0, 1).to(output.dtype)
            lse[start:stop] = own_lse.T
    return output, lse
