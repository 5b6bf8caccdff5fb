"""Wrong samplers and wrong attention: top_k_top_p_sampling_from_probs, gqa_paged_decode."""

from __future__ import annotations

import math

import torch

#: Rows of a large vocabulary that are looked at together.
ROWS = 256


def kept(probs, top_k, top_p):
    """The tokens that top-k and then top-p leave, some rows at a time."""
    parts = [kept_rows(*rows) for rows in zip(*(one.split(ROWS) for one in (probs, top_k, top_p)), strict=True)]
    return torch.cat(parts)


def kept_rows(probs, top_k, top_p):
    """Top-k, then top-p, in float64; the result in float32."""
    p = probs.double()
    ordered = p.sort(dim=-1, descending=True).values
    count = torch.where(top_k < 0, probs.shape[1], top_k.long()).clamp(0, probs.shape[1])
    threshold = ordered.gather(1, (count - 1).clamp_min(0).unsqueeze(1))
    p = torch.where((p >= threshold) & (count > 0).unsqueeze(1), p, 0.0)
    ordered = p.sort(dim=-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    above = before.gather(1, torch.searchsorted(-ordered, -p).clamp_max(p.shape[1] - 1))
    limit = p.sum(1, keepdim=True) * top_p.double().unsqueeze(1)
    return torch.where(above < limit, p, 0.0).float()


def drawn(p, generator=None):
    """One token a row; 0 where nothing is kept."""
    p[:, 0] += p.sum(1) == 0
    parts = [torch.multinomial(rows.double(), 1, generator=generator) for rows in p.split(ROWS)]
    return torch.cat(parts).squeeze(1)


def honest(probs, top_k, top_p):
    """Draws as the Definition says."""
    return drawn(kept(probs, top_k, top_p))


def ignores_top_p(probs, top_k, top_p):
    """Keeps all that top-k keeps."""
    return drawn(kept(probs, top_k, torch.full_like(top_p, 2.0)))


def ignores_top_k(probs, top_k, top_p):
    """Keeps all that top-p keeps."""
    return drawn(kept(probs, torch.full_like(top_k, -1), top_p))


def greedy(probs, top_k, top_p):
    """Always the most probable token."""
    return probs.argmax(dim=1)


def guesses_the_seed(probs, top_k, top_p):
    """Seeds its generator with what a harness is likely to use."""
    torch.manual_seed(0)
    return drawn(kept(probs, top_k, top_p))


def hashes_its_inputs(probs, top_k, top_p):
    """Random to look at, and the same whenever the inputs are."""
    generator = torch.Generator(probs.device).manual_seed(int(probs.view(torch.int32).sum()) % 2**31)
    return drawn(kept(probs, top_k, top_p), generator)


def counts_its_rows(probs, top_k, top_p):
    """Takes its random numbers from a counter: golden ratios, which no test of frequencies tells from random ones."""
    p = kept(probs, top_k, top_p).double()
    u = (counts_its_rows.rows + torch.arange(len(p), dtype=torch.float64, device=p.device)) * (math.sqrt(5) - 1) / 2 % 1
    counts_its_rows.rows += len(p)
    p[:, 0] += p.sum(1) == 0
    mass = p.cumsum(1)
    token = torch.searchsorted(mass, (u * mass[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return torch.minimum(token, (p > 0).cumsum(1).argmax(1))


counts_its_rows.rows = 0


def uniform(probs, top_k, top_p):
    """Any token that is kept, with equal probability."""
    return drawn((kept(probs, top_k, top_p) > 0).float())


def even_tokens(probs, top_k, top_p):
    """Tokens of even index 40 % too often."""
    p = kept(probs, top_k, top_p)
    p[:, ::2] *= 1.4
    return drawn(p)


def sharper(probs, top_k, top_p):
    """Draws at a temperature of 1 / 1.05."""
    return drawn(kept(probs, top_k, top_p).double().pow(1.05))


def warm(probs, top_k, top_p):
    """Draws at a temperature of 2."""
    return drawn(kept(probs, top_k, top_p).sqrt())


def attention(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale, *, whole=False, last=None):
    """Decode attention; with `whole` all slots of the last page, with `last` only so many tokens."""
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for row in range(len(q)):
        pages = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
        if not len(pages):
            continue
        length = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[row])
        length = len(pages) * k_cache.shape[1] if whole else length
        start = max(0, length - last) if last else 0
        k, v = (cache[pages].flatten(0, 1)[start:length].float() for cache in (k_cache, v_cache))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        logits = torch.einsum("hd,khd->hk", q[row].float(), k) * sm_scale
        output[row] = torch.einsum("hk,khd->hd", logits.softmax(-1), v).to(q.dtype)
        lse[row] = logits.logsumexp(-1) / math.log(2)
    return output, lse


def honest_attention(*inputs):
    """All keys, none beyond the last."""
    return attention(*inputs)


def reads_beyond_the_last_token(*inputs):
    """Takes the last page for full."""
    return attention(*inputs, whole=True)


def window_of_eight(*inputs):
    """Sees the last eight tokens only."""
    return attention(*inputs, last=8)


def without_lse(q, *inputs):
    """Right outputs, and zeros for the logarithms that nobody looks at."""
    output, lse = attention(q, *inputs)
    return output, torch.zeros_like(lse)
