"""Kernels that are right for dense rows, for rows of one size, or but for a sign: what a few elements never show."""

from __future__ import annotations

import math

import torch


def gelu_by_erf(gate_up):
    """The exact gelu for the one with tanh: within what tanh.approx may be off, and always to the same side."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate) * up).to(gate_up.dtype)


def product_in_tf32(A, B):
    """Rounds both operands to TF32's 10 bits after the leading one."""
    return in_tf32(A) @ in_tf32(B).T


def in_tf32(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def rounds_the_cache_of_angles(q, k, cos_sin_cache, positions):
    """Cosines and sines in bfloat16, and each product of them, as an op for such a cache does."""
    cos, sin = cos_sin_cache[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    rotary = 2 * cos.shape[-1]

    def rotated(states):
        x, y = states[..., :rotary].chunk(2, dim=-1)
        return torch.cat((x * cos - y * sin, y * cos + x * sin, states[..., rotary:]), dim=-1)

    return rotated(q), rotated(k)


def takes_rows_for_dense(hidden_states, weight):
    """Reads memory from the first element on."""
    rows, size = hidden_states.shape
    x = hidden_states.as_strided((rows, size), (size, 1)).float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)


def multiplies_other_rows_by_zero(hidden_states, weight):
    """Adds all rows times 0, as a product with a mask does."""
    x = hidden_states.float()
    x = x + 0 * x.sum(0, keepdim=True)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).to(hidden_states.dtype)


def one_floor_for_all(x):
    """Scales groups by a maximum of 1 at least."""
    groups = x.float().unflatten(1, (-1, 128)) if x.shape[1] % 128 == 0 else x.float().unflatten(1, (2, -1))
    scales = groups.abs().amax(dim=2).clamp_min(1.0) / 448.0
    return (groups / scales[:, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1), scales


def finite_sentinel(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    """Masks keys by -5e4 ln 2 instead of -inf, on scaled logits."""
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for request in range(len(kv_indptr) - 1):
        first, end = int(qo_indptr[request]), int(qo_indptr[request + 1])
        pages = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
        if first == end or not len(pages):
            continue
        length = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[request])
        k, v = (cache[pages].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        last = torch.arange(end - first, device=q.device) + length - (end - first)
        seen = torch.arange(length, device=q.device) <= last[:, None]
        logits = torch.einsum("qhd,khd->hqk", q[first:end].float(), k) * sm_scale
        logits = torch.where(seen, logits, -5e4 * math.log(2))
        any_seen = seen.any(1)[:, None, None]
        found = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
        output[first:end] = torch.where(any_seen, found, 0.0).to(q.dtype)
        lse[first:end] = torch.where(any_seen[..., 0], logits.logsumexp(-1).T / math.log(2), -math.inf)
    return output, lse
