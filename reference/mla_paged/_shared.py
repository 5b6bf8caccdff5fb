"""Functions that the mla_paged references share."""

import math

import torch


def gather(cache: torch.Tensor, pages: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first `kv_len` tokens of these pages of cache [num_pages, page_size, dim] -> float32 [kv_len, dim].

    The rest of the last page is cut off, not masked: it may hold NaN, and 0 * NaN is NaN.
    """
    return cache.index_select(0, pages).flatten(0, 1)[:kv_len].float()


def decode_logits(
    q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """One query q_nope, q_pe [heads, dim], its keys ckv, kpe [kv_len, dim] -> logits [heads, kv_len], float32."""
    return (q_nope.float() @ ckv.T + q_pe.float() @ kpe.T) * sm_scale


def decoded(logits: torch.Tensor, ckv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [heads, kv_len] and values ckv [kv_len, dim], kv_len >= 1 -> output [heads, dim] and lse [heads], base 2.

    Both are float32.
    """
    return torch.softmax(logits, dim=-1) @ ckv, torch.logsumexp(logits, dim=-1) * math.log2(math.e)


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv: torch.Tensor,
    kpe: torch.Tensor,
    sm_scale: float,
    last_key: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the queries q_nope, q_pe [queries, heads, dim] of a request to its ckv, kpe [kv_len, dim].

    last_key [queries] is the last key that each query may attend to (negative: no key). kv_len >= 1.
    Returns output [queries, heads, head_dim_ckv] and lse [queries, heads], base 2, both float32.
    """
    hidden = torch.arange(ckv.shape[0], device=ckv.device) > last_key[:, None]
    logits = (q_nope.float() @ ckv.T + q_pe.float() @ kpe.T) * sm_scale
    logits = logits.masked_fill(hidden[:, None, :], -math.inf)
    # The maximum of a row without keys is -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
    maximum = logits.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=-1, keepdim=True)
    output = (weights @ ckv) / torch.where(total > 0, total, 1.0)
    lse = (maximum + torch.log(total)) * math.log2(math.e)
    return output, lse.squeeze(-1)
