"""Causal grouped-query attention for prefill after a cached prefix: new keys apart from those in the slots of a cache.

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale, p_h = softmax_j(logit_h) and
output_h = sum_j p_hj v_j. The models use sm_scale = 1/sqrt(qk_dim). Values may have fewer features than keys: in
multi-head latent attention with expanded keys (DeepSeek-V2, section 2.1) they have 128 of 192.

Request b has the new tokens qo_indptr[b] to qo_indptr[b + 1] - 1, each with a query, a key and a value. Before them are
its cached tokens, in the slots kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order; there may be none, and
requests may share them. Slots that no request names are never read, so they may hold NaN. A query attends to all
cached tokens of its request, and to its new tokens up to its own. Queries are processed in blocks whose logits fit in
256 MiB.
All arithmetic is in float64, so that the blocks do not show. The output is rounded once, at the end, to the dtype of
q.
"""

import math

import torch

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
QK_DIM = 128
VO_DIM = 128


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, last_key: torch.Tensor) -> torch.Tensor:
    """Attention of queries q [queries, num_qo_heads, qk_dim] of a request to its k and v [num_kv_heads, kv_len, dim].

    The query heads of a group are rows of one product with the key-value head that they share. last_key [queries] is
    the last key that each query may attend to, at least 0. Returns [queries, num_qo_heads, vo_dim] in float64.
    """
    queries, num_qo_heads, dim = q.shape
    group = num_qo_heads // k.shape[0]
    rows = q.double().view(queries, k.shape[0], group, dim).transpose(0, 1).flatten(1, 2)
    hidden = torch.arange(k.shape[1], device=k.device) > last_key.repeat_interleave(group)[:, None]
    logits = (rows @ k.transpose(1, 2) * sm_scale).masked_fill(hidden, -math.inf)
    output = torch.softmax(logits, dim=-1) @ v
    return output.view(k.shape[0], queries, group, VO_DIM).transpose(0, 1).flatten(1, 2)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """New tokens [total_q, heads, dim], cached ones [num_slots, heads, dim] -> output [total_q, heads, vo_dim]."""
    assert q.shape[1:] == (NUM_QO_HEADS, QK_DIM)
    assert k.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    assert k_buffer.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v_buffer.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    output = torch.zeros(q.shape[0], NUM_QO_HEADS, VO_DIM, dtype=q.dtype, device=q.device)
    queries = qo_indptr.tolist()
    cached = kv_indptr.tolist()
    for b in range(len(queries) - 1):
        if queries[b] == queries[b + 1]:
            continue
        slots = kv_indices[cached[b] : cached[b + 1]]
        new = slice(queries[b], queries[b + 1])
        keys = torch.cat((k_buffer.index_select(0, slots), k[new])).transpose(0, 1).double()
        values = torch.cat((v_buffer.index_select(0, slots), v[new])).transpose(0, 1).double()
        kv_len = keys.shape[1]
        block = max(1, 2**25 // (NUM_QO_HEADS * kv_len))
        for start in range(queries[b], queries[b + 1], block):
            stop = min(start + block, queries[b + 1])
            last_key = torch.arange(start, stop, device=k.device) - queries[b + 1] + kv_len
            output[start:stop] = attend(q[start:stop], keys, values, sm_scale, last_key).to(output.dtype)
    return output
