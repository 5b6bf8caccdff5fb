"""Causal grouped-query attention for prefill after a cached prefix[[SINKS:, with sinks]]
[[LOGITS_SOFT_CAP:, with capped logits]][[WINDOW_SIZE:, with a window of keys]].

Query heads share key-value heads in consecutive groups: with g = num_qo_heads / num_kv_heads, query head h attends with
key-value head h // g (Ainslie et al., "GQA", EMNLP 2023). logit_hj = q_h . k_j * sm_scale,
[[LOGITS_SOFT_CAP: capped to LOGITS_SOFT_CAP * tanh(logit_hj / LOGITS_SOFT_CAP) (Gemma 2, 2024),]]
[[not SINKS: p_h = softmax_j(logit_h) and output_h = sum_j p_hj v_j.]]
[[SINKS: p_hj = exp(logit_hj) / (exp(sink_h) + sum_j exp(logit_hj)), where the sink of a head is the logit of a key
whose value is zero (gpt-oss, 2025), and output_h = sum_j p_hj v_j.]]
The models use sm_scale = 1/sqrt(qk_dim). Values may have fewer features than keys: in multi-head latent attention with
expanded keys (DeepSeek-V2, section 2.1) they have 128 of 192.

Request b has the new tokens qo_indptr[b] to qo_indptr[b + 1] - 1, each with a query, a key and a value. Before them are
its cached tokens, in the slots kv_indices[kv_indptr[b] : kv_indptr[b + 1]], in this order; there may be none, and
requests may share them. Slots that no request names are never read, so they may hold NaN. A query attends to
[[not WINDOW_SIZE: all cached tokens of its request, and to its new tokens up to its own.]]
[[WINDOW_SIZE: the WINDOW_SIZE keys that end with its own, fewer if its request has fewer before it.]]

Queries are processed in blocks of QUERY_BLOCK. All arithmetic is in
[[FLOAT64: float64, so the blocks do not show.]][[not FLOAT64: float32.]]
The output is rounded once, at the end, to the dtype of q.
"""

import torch

from ._shared import attend

NUM_QO_HEADS = 32
NUM_KV_HEADS = 8
QK_DIM = 128
VO_DIM = 128
QUERY_BLOCK = 64
LOGITS_SOFT_CAP = None
WINDOW_SIZE = None
SINKS = None
LSE = None
KEYLESS = None
FLOAT64 = True


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sinks: torch.Tensor | None,
    sm_scale: float,
) -> torch.Tensor:
    """New tokens [total_q, heads, dim], cached ones [num_slots, heads, dim] -> output [total_q, heads, vo_dim].

    [[SINKS: sinks [num_qo_heads].]]
    """
    assert q.shape[1:] == (NUM_QO_HEADS, QK_DIM)
    assert k.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    assert k_buffer.shape[1:] == (NUM_KV_HEADS, QK_DIM)
    assert v_buffer.shape[1:] == (NUM_KV_HEADS, VO_DIM)
    if sinks is not None:
        assert sinks.shape == (NUM_QO_HEADS,)
    output = torch.zeros(q.shape[0], NUM_QO_HEADS, VO_DIM, dtype=q.dtype, device=q.device)
    queries, cached = qo_indptr.tolist(), kv_indptr.tolist()
    for b in range(len(queries) - 1):
        slots = kv_indices[cached[b] : cached[b + 1]]
        new = slice(queries[b], queries[b + 1])
        keys = torch.cat((k_buffer.index_select(0, slots), k[new]))
        values = torch.cat((v_buffer.index_select(0, slots), v[new]))
        if FLOAT64 is None:
            keys, values = keys.float(), values.float()
        else:
            keys, values = keys.double(), values.double()
        for start in range(queries[b], queries[b + 1], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, queries[b + 1])
            last_key = start - queries[b + 1] + keys.shape[0]
            output[start:stop] = attend(q[start:stop], keys, values, sm_scale, last_key, sinks)
    return output
