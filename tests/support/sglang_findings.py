"""Probes of defects of SGLang's own kernels: see kernel_findings.py."""

from __future__ import annotations

import torch


def first_expert() -> bool:
    """One token whose only expert is 0, with the weight 1: the output is its row."""
    from sglang.srt.layers.moe.ep_moe.kernels import post_reorder_triton_kernel

    rows = torch.ones(1, 512, dtype=torch.bfloat16, device="cuda")
    output = torch.full_like(rows, torch.nan)
    row, experts = (torch.zeros(1, 1, dtype=torch.int32, device="cuda") for _ in range(2))
    weights = torch.ones(1, 1, device="cuda")
    post_reorder_triton_kernel[(1,)](rows, output, row.flatten(), experts, weights, 1, 512, BLOCK_SIZE=512)
    return bool((output == 1).all())


def dropped_token() -> bool:
    """Top-k 1 keeps token 0. With seed 2 at position 1595, the hash of place 51182 of a sorted row is 2^32 - 1."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    probs = torch.full((1, 128256), 1e-9, device="cuda")
    probs[0, 0] = 1 - 128255e-9
    k, seed, position = (torch.tensor([value], device="cuda") for value in (1, 2, 1595))
    top_p, min_p = (torch.tensor([value], device="cuda") for value in (1.0, 0.0))
    with torch.compiler.set_stance("force_eager"):
        token = top_k_top_p_min_p_sampling_from_probs_torch(probs, k.int(), top_p, min_p, False, seed, position)
    return int(token) == 0


def logit_of_one_key() -> bool:
    """One head and one key: the logit, and with it the lse, is 256 + 255, which bf16 rounds."""
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    q = torch.ones(1, 1, 256, dtype=torch.bfloat16, device="cuda")
    k = q.clone()
    k[..., 0] = 256
    splits = 8
    parts = torch.zeros(1, 1, splits, 256, device="cuda")
    lse = torch.full((1, 1, splits), -torch.inf, device="cuda")
    offsets = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    counts = torch.tensor([splits], dtype=torch.int32, device="cuda")
    output = torch.empty_like(q)
    decode_attention_fwd(q, k, k.clone(), output, offsets, slots, parts, lse, counts, splits, 1.0, 1.0, 1.0)
    return abs(float(torch.logsumexp(lse, dim=-1)) - 511) < 0.01


def group_of_zeros() -> bool:
    """One token of ones, whose last 128 compressed features are 0: so are their codes and their scale."""
    from sglang.srt.layers.attention.nsa.quant_k_cache import quantize_k_cache_separate

    k_nope = torch.ones(1, 512, dtype=torch.bfloat16, device="cuda")
    k_nope[:, 384:] = 0
    rows, _ = quantize_k_cache_separate(k_nope, torch.ones(1, 64, dtype=torch.bfloat16, device="cuda"))
    codes, scales = (part.contiguous() for part in rows.view(1, 528).tensor_split((512,), dim=1))
    zero = codes[:, 384:].view(torch.float8_e4m3fn).float() == 0
    return bool(zero.all()) and float(scales.view(torch.float32)[0, 3]) == 0


PROBES = [
    ("post_reorder_triton_kernel: expert 0 is left out", first_expert),
    ("top_k_top_p_min_p_sampling_from_probs_torch: a seed draws a dropped token", dropped_token),
    ("decode_attention_fwd: logits of multi-head attention are summed in bf16", logit_of_one_key),
    ("quantize_k_cache_separate: codes of a group of zeros", group_of_zeros),
]
