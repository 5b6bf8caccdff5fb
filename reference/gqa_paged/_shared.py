"""Attention, as all references of it share it. Constants that are None are features that a family lacks (see below).

LAST_KEY says whether queries may attend to some keys only, KEYLESS whether to none, LSE whether it is an output,
K_SCALE whether the cache is in fp8, FLOAT64 whether the arithmetic is in float64.
"""

import math

import torch

LAST_KEY = True
LSE = True
KEYLESS = True
SINKS = None
LOGITS_SOFT_CAP = None
WINDOW_SIZE = None
K_SCALE = None
FLOAT64 = None


def gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The tokens of these pages of [num_pages, page_size, heads, dim] -> float32 [tokens, heads, dim]."""
    if K_SCALE is None:
        return cache.index_select(0, pages).flatten(0, 1).float()
    else:
        # As bytes, because not every device gathers fp8.
        return cache.view(torch.uint8)[pages].view(cache.dtype).flatten(0, 1).float()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    last_key: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor if LSE is None else tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries q [queries, num_qo_heads, qk_dim] to k and v [kv_len, num_kv_heads, dim], kv_len >= 0.

    [[LAST_KEY: The first query may attend to keys up to last_key, each query to one more than that before it.]]
    Returns output [queries, num_qo_heads, vo_dim]
    [[LSE: and lse [queries, num_qo_heads], base 2,]] in the dtype of k.
    """
    q = q.float() if FLOAT64 is None else q.double()
    # A group of query heads shares a key-value head.
    groups = (q * sm_scale).unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("qhgd,khd->hqgk", groups, k)
    if LOGITS_SOFT_CAP is not None:
        logits = torch.tanh(logits / LOGITS_SOFT_CAP) * LOGITS_SOFT_CAP
    if last_key is not None:
        last = last_key + torch.arange(q.shape[0], device=q.device)[:, None, None]
        position = torch.arange(k.shape[0], device=q.device)
        if WINDOW_SIZE is None:
            logits = logits.masked_fill(position > last, -math.inf)
        else:
            logits = logits.masked_fill((position > last) | (position <= last - WINDOW_SIZE), -math.inf)
    output = torch.einsum("hqgk,khd->qhgd", torch.softmax(logits, dim=-1), v).flatten(1, 2)
    if LSE is not None or sinks is not None:
        lse = torch.logsumexp(logits, dim=-1).transpose(0, 1).flatten(1)
    if sinks is not None:
        # One logit more in each row, of a key whose value is zero.
        with_sink = torch.logaddexp(lse, sinks)
        output = output * torch.exp(lse - with_sink).unsqueeze(-1)
        if LSE is not None:
            lse = with_sink
    if last_key is not None and KEYLESS is not None:
        # The softmax of a query without keys is NaN.
        output = output.masked_fill(last < 0, 0.0)
    if LSE is None:
        return output
    else:
        return output, lse * math.log2(math.e)
