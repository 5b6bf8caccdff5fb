"""Probes of attention over no keys at all: see kernel_findings.py. The right output is 0, and the right lse -inf."""

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


def triton_decode() -> bool:
    """One request of 2 heads of 64 features, which share a key head, without keys."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    q = torch.ones(1, 2, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.ones(1, 1, 64, dtype=torch.bfloat16, device="cuda")
    splits = 8
    parts = torch.zeros(1, 2, splits, 64, device="cuda")
    lse = torch.full((1, 2, splits), -torch.inf, device="cuda")
    offsets = torch.zeros(2, dtype=torch.int32, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    counts = torch.tensor([splits], dtype=torch.int32, device="cuda")
    output = torch.empty_like(q)
    decode_attention_fwd(q, k, k.clone(), output, offsets, slots, parts, lse, counts, splits, 0.125, 1.0, 1.0)
    return bool((output == 0).all())


#: The name of each in findings/kernels.json, and its probe.
PROBES = [
    ("merge_state: two states without keys", merge_of_flashinfer),
    ("merge_state_v2: two states without keys", merge_of_sgl_kernel),
    ("flash_mla_with_kvcache: the lse of a request without keys", flash_mla),
    ("decode_attention_fwd: a request without keys", triton_decode),
]
