"""Probes of defects of SGLang's own kernels: see kernel_findings.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_findings import triton_decode


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
    q = torch.ones(1, 1, 256, dtype=torch.bfloat16, device="cuda")
    k = q.clone()
    k[..., 0] = 256
    return abs(float(triton_decode(q, k, 1)[1]) - 511) < 0.01


def group_of_zeros() -> bool:
    """One token of ones, whose last 128 compressed features are 0: so are their codes and their scale."""
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    k_nope = torch.ones(1, 512, dtype=torch.bfloat16, device="cuda")
    k_nope[:, 384:] = 0
    rows, _ = quantize_k_cache_separate(k_nope, torch.ones(1, 64, dtype=torch.bfloat16, device="cuda"))
    codes, scales = (part.contiguous() for part in rows.view(1, 528).tensor_split((512,), dim=1))
    zero = codes[:, 384:].view(torch.float8_e4m3fn).float() == 0
    return bool(zero.all()) and float(scales.view(torch.float32)[0, 3]) == 0


def logit_beside_fp8_keys() -> bool:
    """One request of 2 heads that share a key of ones in e4m3: the logit, and so the lse, is 17, no e4m3 number."""
    q = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device="cuda")
    q[..., 0] = 17
    k = torch.ones(1, 1, 64, device="cuda").to(torch.float8_e4m3fn)
    return bool(((triton_decode(q, k, 1)[1] - 17).abs() < 0.01).all())


def group_of_equal_experts() -> bool:
    """Experts 0 and 1 of group 0 share the best score of all, so their group is the best, and they are chosen."""
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    logits = torch.full((1, 256), -10.0, device="cuda")
    logits[0, :2] = 2
    logits[0, 32:160:32], logits[0, 33:160:32] = 1, 0  # the two best of groups 1 to 4
    bias = torch.zeros(256, device="cuda")
    _, ids = moe_fused_gate(logits, bias, 8, num_expert_group=8, topk_group=4)
    return {0, 1} <= set(ids[0].tolist())


def delta_rule(kernel: Callable[..., Any], counts: Sequence[int]) -> torch.Tensor:
    """The output of sequences of so many tokens, with one head, from states of zeros; no state decays much."""
    tokens, generator = sum(counts), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 1, 128, generator=generator).bfloat16().cuda() / 12 for _ in range(3))
    gate = (1, tokens, 1, 128) if kernel.__name__ == "chunk_kda" else (1, tokens, 1)
    output = kernel(
        q=q,
        k=k,
        v=v,
        g=torch.full(gate, -0.1, device="cuda"),
        beta=torch.full((1, tokens, 1), 0.5, device="cuda"),
        scale=1.0,
        initial_state=torch.zeros(len(counts), 1, 128, 128, device="cuda"),
        initial_state_indices=torch.arange(len(counts), dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.tensor([0, *counts], device="cuda").cumsum(0),
    )
    return output[0] if isinstance(output, tuple) else output


def tokens_after_an_empty_sequence(name: str) -> bool:
    """Three tokens after a sequence without any come out as the same three by themselves."""
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
    from sglang.kernels.ops.attention.fla.kda import chunk_kda

    kernel = chunk_kda if name == "chunk_kda" else chunk_gated_delta_rule
    alone, after = (delta_rule(kernel, counts) for counts in ([3], [0, 3]))
    return torch.equal(alone, after)


def fast_decays() -> bool:
    """Each of 16 tokens forgets the state but for 2^-20, and takes in half of its value: each reads that alone."""
    from sglang.kernels.ops.attention.fla.kda import chunk_kda

    key = torch.zeros(1, 16, 1, 128, dtype=torch.bfloat16, device="cuda")
    key[..., 0] = 1.0
    v = torch.randn(1, 16, 1, 128, device="cuda").bfloat16()
    output = chunk_kda(
        q=key,
        k=key.clone(),
        v=v.clone(),
        g=torch.full(key.shape, -20 * math.log(2), device="cuda"),
        beta=torch.full((1, 16, 1), 0.5, device="cuda"),
        scale=1.0,
        initial_state=torch.zeros(1, 1, 128, 128, device="cuda"),
        initial_state_indices=torch.zeros(1, dtype=torch.int32, device="cuda"),
        cu_seqlens=torch.tensor([0, 16], device="cuda"),
    )
    return bool(((output.float() - 0.5 * v.float()).abs() < 0.05).all())


def keys_beyond_32_bits() -> bool:
    """Of 87,400 tokens with 128 heads of 192 features, the last ones begin beyond 2^31. All inputs are ones; 4.3 GB."""
    from sglang.kernels.ops.attention.mla_qk_prep import concat_and_cast_mha_k_triton

    count = 87_400
    nope, rope = (torch.ones(1, *shape, dtype=torch.bfloat16, device="cuda") for shape in ((128, 128), (1, 64)))
    keys = torch.zeros(count, 128, 192, dtype=torch.bfloat16, device="cuda")
    concat_and_cast_mha_k_triton(keys, nope.expand(count, -1, -1), rope.expand(count, -1, -1))
    return bool((keys[-1] == 1).all())


PROBES = [
    ("decode_attention_fwd: queries beside an fp8 cache are rounded to e4m3", logit_beside_fp8_keys),
    ("moe_fused_gate of SGLang: a group of two equal experts scores too low", group_of_equal_experts),
    *(
        (f"{name}: tokens after a sequence without any", functools.partial(tokens_after_an_empty_sequence, name))
        for name in ("chunk_gated_delta_rule", "chunk_kda")
    ),
    ("chunk_kda: decays beyond 2^126 within 16 tokens", fast_decays),
    ("post_reorder_triton_kernel: expert 0 is left out", first_expert),
    ("top_k_top_p_min_p_sampling_from_probs_torch: a seed draws a dropped token", dropped_token),
    ("decode_attention_fwd: logits of multi-head attention are summed in bf16", logit_of_one_key),
    ("quantize_k_cache_separate: codes of a group of zeros", group_of_zeros),
]
