"""Functions that the gqa_paged references share."""

import math

import torch


def gather(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first `kv_len` tokens of these pages of [num_pages, page_size, heads, dim] -> float32 [heads, kv_len, dim].

    The rest of the last page is cut off, not masked: it may hold NaN, and 0 * NaN is NaN.
    """
    return cache.index_select(0, pages).flatten(0, 1)[:kv_len].transpose(0, 1).float()


def extended(buffer: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A request's cached tokens, in these slots of [num_slots, heads, dim], then its new ones [tokens, heads, dim].

    Returns float32 [heads, kv_len, dim].
    """
    return torch.cat((buffer.index_select(0, slots), new)).transpose(0, 1).float()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, last_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the queries q [queries, num_qo_heads, dim] to k and v [num_kv_heads, kv_len, dim].

    The query heads of a group are rows of one product with the key-value head that they share. last_key [queries] is
    the last key that each query may attend to (negative: no key). kv_len >= 1.
    Returns output [queries, num_qo_heads, dim] and lse [queries, num_qo_heads], base 2, both float32.
    """
    return weighted(causal(logits_of(q, k, sm_scale), last_key), v, q.shape[0])


def decode_logits(q: torch.Tensor, k: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """One query q [num_qo_heads, dim], k [num_kv_heads, kv_len, dim] -> logits [num_kv_heads, group, kv_len]."""
    return q.float().unflatten(0, (k.shape[0], -1)) @ k.mT * sm_scale


def decoded(logits: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One query's logits [num_kv_heads, group, kv_len], and v [num_kv_heads, kv_len, dim].

    kv_len >= 1. Returns output [num_qo_heads, dim] and lse [num_qo_heads], base 2, both float32.
    """
    output = torch.softmax(logits, dim=-1) @ v
    lse = torch.logsumexp(logits, dim=-1) * math.log2(math.e)
    return output.flatten(0, 1), lse.flatten()


def decoded_with_sinks(logits: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decoded`, with one logit more in each row, of a key whose value is zero: sinks [num_qo_heads]."""
    logits = torch.cat((logits, sinks.view(v.shape[0], -1, 1)), dim=-1)
    output = torch.softmax(logits, dim=-1)[:, :, :-1] @ v
    lse = torch.logsumexp(logits, dim=-1) * math.log2(math.e)
    return output.flatten(0, 1), lse.flatten()


def logits_of(q: torch.Tensor, k: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """q [queries, num_qo_heads, dim], k [num_kv_heads, kv_len, dim] -> logits [num_kv_heads, rows, kv_len].

    The rows are the queries, and for each of them the query heads of a group.
    """
    queries, num_qo_heads, dim = q.shape
    group = num_qo_heads // k.shape[0]
    rows = q.float().view(queries, k.shape[0], group, dim).transpose(0, 1).flatten(1, 2)
    return rows @ k.transpose(1, 2) * sm_scale


def capped(logits: torch.Tensor, cap: int) -> torch.Tensor:
    """cap * tanh(logits / cap), which stays between -cap and cap."""
    return torch.tanh(logits / cap) * cap


def causal(logits: torch.Tensor, last_key: torch.Tensor) -> torch.Tensor:
    """The logits, -inf for keys after the last one that a query may attend to, last_key [queries]."""
    last = last_key.repeat_interleave(logits.shape[1] // last_key.shape[0])[:, None]
    return logits.masked_fill(torch.arange(logits.shape[2], device=logits.device) > last, -math.inf)


def windowed(logits: torch.Tensor, last_key: torch.Tensor, window: int) -> torch.Tensor:
    """The logits, -inf for all keys but the `window` ones that end with last_key [queries]."""
    last = last_key.repeat_interleave(logits.shape[1] // last_key.shape[0])[:, None]
    position = torch.arange(logits.shape[2], device=logits.device)
    return logits.masked_fill((position > last) | (position <= last - window), -math.inf)


def weighted(logits: torch.Tensor, v: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [num_kv_heads, rows, kv_len] and v [num_kv_heads, kv_len, dim] -> output [queries, num_qo_heads, dim].

    The second result is the lse [queries, num_qo_heads], base 2. A row without keys has output 0 and lse -inf.
    """
    # The maximum of a row without keys is -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
    maximum = logits.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=-1, keepdim=True)
    output = (weights @ v) / torch.where(total > 0, total, 1.0)
    lse = (maximum + torch.log(total)) * math.log2(math.e)
    return of_queries(output, queries), of_queries(lse, queries).squeeze(2)


def weighted_with_sinks(
    logits: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, queries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `weighted`, with one logit more in each row, of a key whose value is zero: sinks [num_qo_heads]."""
    sink = sinks.view(v.shape[0], -1).repeat(1, queries).unsqueeze(-1)
    maximum = torch.maximum(logits.amax(dim=-1, keepdim=True), sink)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - maximum)
    lse = (maximum + torch.log(total)) * math.log2(math.e)
    return of_queries((weights @ v) / total, queries), of_queries(lse, queries).squeeze(2)


def of_queries(rows: torch.Tensor, queries: int) -> torch.Tensor:
    """Rows [num_kv_heads, queries * group, dim] -> [queries, num_kv_heads * group, dim]."""
    return rows.unflatten(1, (queries, -1)).transpose(0, 1).flatten(1, 2)


def requests_with_keys(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> list[tuple[int, int, int, int]]:
    """For each request with keys: its number, its pages first to end - 1 in kv_indices, and its number of keys."""
    found = []
    for b, last_page_len in enumerate(kv_last_page_len.tolist()):
        first, end = kv_indptr[b : b + 2].tolist()
        if end > first:
            found.append((b, first, end, (end - first - 1) * page_size + last_page_len))
    return found
