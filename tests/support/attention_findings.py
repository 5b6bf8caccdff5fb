"""Probes of attention over no keys, whose output is 0 and whose lse is -inf, and over keys with NaN after them: see
kernel_findings.py."""

from __future__ import annotations

from collections.abc import Callable

import torch


def nothing_merged(merge: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Two states of one query and one head of 64 features, neither of which has keys."""
    output = torch.zeros(1, 1, 64, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((1, 1), -torch.inf, device="cuda")
    merged, merged_lse = merge(output, lse, output.clone(), lse.clone())
    return bool((merged == 0).all() and (merged_lse == -torch.inf).all())


def merge_of_flashinfer() -> bool:
    import flashinfer.cascade

    return nothing_merged(flashinfer.cascade.merge_state)


def merge_of_sgl_kernel() -> bool:
    import sgl_kernel

    return nothing_merged(sgl_kernel.merge_state_v2)


def flash_mla() -> bool:
    """One request of 16 heads without keys, and a cache of one page."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    q = torch.ones(1, 1, 16, 576, dtype=torch.bfloat16, device="cuda")
    cache = torch.ones(1, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    table, lengths = torch.zeros(2, 1, dtype=torch.int32, device="cuda").split(1)
    metadata, splits = get_mla_metadata(lengths.view(1), 16, 1)
    output, lse = flash_mla_with_kvcache(q, cache, table, lengths.view(1), 512, metadata, splits, causal=True)
    return bool((output == 0).all() and (lse == -torch.inf).all())


def triton_decode(q: torch.Tensor, k: torch.Tensor, keys: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the lse of SGLang's kernel for one request of so many keys, all at slot 0; values are the keys."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    splits = 8
    parts = torch.zeros(*q.shape[:2], splits, q.shape[2], device="cuda")
    lse = torch.full((*q.shape[:2], splits), -torch.inf, device="cuda")
    offsets = torch.tensor([0, keys], dtype=torch.int32, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    counts = torch.tensor([splits], dtype=torch.int32, device="cuda")
    output = torch.empty_like(q)
    decode_attention_fwd(q, k, k.clone(), output, offsets, slots, parts, lse, counts, splits, scale, 1.0, 1.0)
    return output, torch.logsumexp(lse, dim=-1)


def triton_decode_without_keys() -> bool:
    """One request of 2 heads of 64 features, which share a key head, without keys."""
    q, k = (torch.ones(1, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (2, 1))
    output, lse = triton_decode(q, k, 0, 0.125)
    return bool((output == 0).all() and (lse == -torch.inf).all())


def nan_after_the_last_key() -> bool:
    """One request of 33 queries and 389 keys in four pages of 128 tokens, the last of which holds NaN after them."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    q = torch.randn(33, 8, 128, device="cuda").bfloat16()
    k, v = (torch.randn(4, 128, 1, 128, device="cuda").bfloat16() for _ in range(2))
    v[3, 5:] = torch.nan
    output = flash_attn_with_kvcache(
        q,
        k,
        v,
        page_table=torch.arange(4, dtype=torch.int32, device="cuda").view(1, 4),
        cache_seqlens=torch.tensor([389], dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.tensor([0, 33], dtype=torch.int32, device="cuda"),
        max_seqlen_q=33,
        causal=True,
    )
    return bool(output.isfinite().all())


#: The name of each in findings/kernels.json, and its probe.
PROBES = [
    ("merge_state: two states without keys", merge_of_flashinfer),
    ("merge_state_v2: two states without keys", merge_of_sgl_kernel),
    ("flash_mla_with_kvcache: the lse of a request without keys", flash_mla),
    ("decode_attention_fwd: a request without keys", triton_decode_without_keys),
    ("flash_attn_with_kvcache: NaN after the last key of a page of 128", nan_after_the_last_key),
]
