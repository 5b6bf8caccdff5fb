"""Sparse attention with sinks: attention of every query to the keys that were chosen for it, which are the values too.

Every query head h of a token attends to the same keys k_j of the chosen slots j: logit_hj = (q_h . k_j) * sm_scale, and
next to them to a sink that has no value: p_h = softmax over j of logit_hj together with sinks[h], output_h = sum_j p_hj
k_j (DeepSeek-V4, whose sliding window and compressed keys are slots of one buffer).

The first topk_length[t] entries of sparse_indices[t] are the slots of token t. Negative ones, anywhere among them,
choose nothing. Slots that no row of sparse_indices has are never read, so they may hold NaN. A token that chooses
nothing has output 0. There is at least one slot. Tokens are computed in blocks whose keys stay in a CPU's cache.
All arithmetic is in float32. The output is rounded once, at the end, to the dtype of q.
"""

import math

import torch

NUM_QO_HEADS = 64
HEAD_DIM = 512
TOPK = 640
BLOCK = 2


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    sparse_indices: torch.Tensor,
    topk_length: torch.Tensor,
    sinks: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    """q [num_tokens, num_qo_heads, head_dim], kv [num_slots, head_dim], sparse_indices [num_tokens, topk],
    topk_length [num_tokens], sinks [num_qo_heads].

    Returns output, shaped and typed as q.
    """
    assert q.shape[1:] == (NUM_QO_HEADS, HEAD_DIM)
    assert kv.shape[1] == HEAD_DIM
    assert sparse_indices.shape[1] == TOPK
    assert sinks.shape == (NUM_QO_HEADS,)
    place = torch.arange(TOPK, device=q.device)
    output = torch.zeros_like(q)
    for own in torch.arange(q.shape[0], device=q.device).split(BLOCK):
        slots = torch.where(place < topk_length[own, None], sparse_indices[own], -1)
        nothing = slots < 0
        # A slot that is not chosen may hold NaN, and 0 * NaN is NaN: the keys of another one stand in for it.
        largest = slots.amax(dim=1)
        read = torch.where(nothing, largest[:, None], slots).clamp_min(0)
        keys = kv.index_select(0, read.flatten()).unflatten(0, read.shape).float()
        logits = (q[own].float() @ keys.mT * sm_scale).masked_fill(nothing.unsqueeze(1), -math.inf)
        with_sink = torch.cat((logits, sinks[:, None].expand(len(own), -1, -1)), dim=2)
        found = torch.softmax(with_sink, dim=2)[:, :, :TOPK] @ keys
        output[own] = found.masked_fill(largest[:, None, None] < 0, 0.0).to(output.dtype)
    return output
