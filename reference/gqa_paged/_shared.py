"""Functions that the gqa_paged references share."""

import math

import torch


def gather(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first `kv_len` tokens of these pages of [num_pages, page_size, heads, dim] -> float32 [heads, kv_len, dim].

    The rest of the last page is cut off, not masked: it may hold NaN, and 0 * NaN is NaN.
    """
    return cache.index_select(0, pages).flatten(0, 1)[:kv_len].transpose(0, 1).float()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sm_scale: float,
    last_key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the queries q [queries, num_qo_heads, dim] of a request to its k and v [num_kv_heads, kv_len, dim].

    The query heads of a group are rows of one product with the key-value head that they share. last_key [queries] is
    the last key that each query may attend to (negative: no key); with None, every query attends to every key.
    kv_len >= 1. Returns output [queries, num_qo_heads, dim] and lse [queries, num_qo_heads], base 2, both float32.
    """
    queries, num_qo_heads, dim = q.shape
    group = num_qo_heads // k.shape[0]
    rows = q.float().view(queries, k.shape[0], group, dim).transpose(0, 1).flatten(1, 2)
    logits = rows @ k.transpose(1, 2) * sm_scale
    if last_key is not None:
        hidden = torch.arange(k.shape[1], device=k.device) > last_key.repeat_interleave(group)[:, None]
        logits = logits.masked_fill(hidden, -math.inf)
    # The maximum of a row without keys is -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
    maximum = logits.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=-1, keepdim=True)
    output = (weights @ v) / torch.where(total > 0, total, 1.0)
    lse = (maximum + torch.log(total)) * math.log2(math.e)
    by_query = (k.shape[0], queries, group)
    return (
        output.view(*by_query, -1).transpose(0, 1).flatten(1, 2),
        lse.view(by_query).transpose(0, 1).flatten(1, 2),
    )
