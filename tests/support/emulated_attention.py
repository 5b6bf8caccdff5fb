"""Models of real attention kernels in float32 on a CPU, and stand-ins for their libraries that take the same calls."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

LOWEST = torch.finfo(torch.float32).min


def attention_model(q, requests, value_dim, sm_scale, causal, rounding, chunk=10**9, tile=16):
    """A kernel as in its source, applied to (first, end, keys, values) of each request.

    Keys are split into chunks whose outputs are kept in bf16 (`rounding.partial`) and, if that is 2, rounded again in
    groups of 4. Tiles are processed from last to first with a running maximum. Weights are rounded to bf16 for the
    product with the values (`rounding.weights`) and for their own sum (`rounding.sum`). Masked logits and the maximum
    of nothing are -inf, which becomes the lowest finite number before it is subtracted.
    """
    output, lse = (
        q.new_full((*q.shape[:2], value_dim), math.nan),
        q.new_full(q.shape[:2], math.nan, dtype=torch.float32),
    )
    scale = torch.tensor(sm_scale, dtype=torch.float32) * torch.tensor(math.log2(math.e))
    for request in requests:
        kv_len, q_len = request.keys.shape[0], request.end - request.first
        if not q_len:
            continue
        group = q.shape[1] // request.keys.shape[1]
        keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (request.keys, request.values))
        logits = q[request.first : request.end].float().transpose(0, 1) @ keys.mT
        last = kv_len - q_len + torch.arange(q_len) if causal else torch.full((q_len,), kv_len)
        logits = logits.masked_fill(torch.arange(kv_len) > last[:, None], -math.inf)
        partial = [
            one_chunk(logits[..., start : start + chunk], values[:, start : start + chunk], scale, rounding, tile)
            for start in range(0, max(kv_len, 1), chunk)
        ]
        if len(partial) > 1:
            if rounding.partial:
                partial = stored(partial)
            if rounding.partial == 2:
                partial = stored([merge(partial[start::4]) for start in range(min(4, len(partial)))])
            partial = [merge(partial)]
        (o, s), rows = partial[0], slice(request.first, request.end)
        output[rows], lse[rows] = o.transpose(0, 1).to(q.dtype), s.squeeze(-1).T
    return {"output": output, "lse": lse}


def one_chunk(logits, values, scale, rounding, tile):
    """Output and base-2 lse of some keys, both float32."""
    m, d = torch.full((*logits.shape[:2], 1), -math.inf), torch.ones(*logits.shape[:2], 1)
    o = torch.zeros(*logits.shape[:2], values.shape[-1])
    for first in reversed(range(0, logits.shape[-1], tile)):
        part = slice(first, first + tile)
        new = m.maximum(logits[..., part].amax(-1, keepdim=True))
        scaled = (new * scale).clamp_min(LOWEST)
        p, rescale = torch.exp2(logits[..., part] * scale - scaled), torch.exp2(m * scale - scaled)
        rounded = p.bfloat16().float() if rounding.weights else p
        d = d * rescale + (rounded if rounding.sum else p).sum(-1, keepdim=True)
        o, m = o * rescale + rounded @ values[:, part], new
    return torch.where(m > -math.inf, o / d, 0.0), m * scale + torch.log2(d)


def stored(partial):
    """Outputs rounded to bf16."""
    return [(o.bfloat16().float(), s) for o, s in partial]


def merge(partial):
    """Merges outputs and lses of disjoint keys."""
    top = torch.stack([s for _, s in partial]).amax(0)
    weights = [torch.exp2((s - top).nan_to_num(-math.inf)) for _, s in partial]
    total = torch.stack(weights).sum(0)
    output = torch.stack([o * w for (o, _), w in zip(partial, weights, strict=True)]).sum(0)
    return torch.where(total > 0, output / total, 0.0), top + torch.log2(total)


def paged_requests(keys, values, qo_indptr, kv_indptr, kv_indices, kv_lens):
    """Requests as flashinfer reads them from caches [pages, page_size, key-value heads, dim]."""
    for b, kv_len in enumerate(kv_lens):
        pages = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long()
        own_keys, own_values = (cache[pages].flatten(0, 1)[:kv_len] for cache in (keys, values))
        yield SimpleNamespace(first=int(qo_indptr[b]), end=int(qo_indptr[b + 1]), keys=own_keys, values=own_values)


def requests_in(memory):
    """Requests as the oracle finds them in its memory."""
    for number, kv_len in enumerate(memory.lengths):
        slots = memory.slots(torch.tensor([[number]]), torch.arange(kv_len).unsqueeze(0))[0]
        first, end = memory.queries[number : number + 2]
        yield SimpleNamespace(first=first, end=end, keys=memory.keys[slots], values=memory.values[slots])


def counted_lengths(kv_indptr, last_page_len, page_size):
    """Lengths as flashinfer's get_seq_lens counts them: last_page_len tokens even for a request without pages."""
    lengths = []
    for pages, last in zip(kv_indptr.diff().tolist(), last_page_len.tolist(), strict=True):
        assert pages or not last, "get_seq_lens would count tokens of a request without pages"
        lengths.append((pages - 1) * page_size + last if pages else 0)
    return lengths


def ragged_requests(k, v, qo_indptr, kv_indptr):
    for b in range(len(kv_indptr) - 1):
        own = slice(int(kv_indptr[b]), int(kv_indptr[b + 1]))
        yield SimpleNamespace(first=int(qo_indptr[b]), end=int(qo_indptr[b + 1]), keys=k[own], values=v[own])
