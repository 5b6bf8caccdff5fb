"""Wrong products, activations and quantizers: gemm_n128_k2048, silu_and_mul_i176, per_token_group_quant_fp8."""

from __future__ import annotations

import torch


def right_gemm(A, B):
    return (A.float() @ B.float().T).to(A.dtype)


def gemm_in_fp8(A, B):
    """Quantizes both operands to fp8, each with one scale."""

    def rounded(x):
        scale = x.float().abs().amax(dim=(0, 1)).clamp_min(1e-12) / 448 if len(x) else 1.0
        return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale

    return (rounded(A) @ rounded(B).T).to(A.dtype)


def gemm_of_half_the_features(A, B):
    """Half of the terms, doubled: right on average."""
    half = A.shape[1] // 2
    return (2 * (A[:, :half].float() @ B[:, :half].float().T)).to(A.dtype)


def gemm_in_bfloat16(A, B):
    """Rounds the operands to bfloat16."""
    return (A.bfloat16().float() @ B.bfloat16().float().T).to(A.dtype)


def gemm_rounded_in_between(A, B):
    """Rounds to float16 after every 64 terms, as a kernel with a float16 accumulator does."""
    total = torch.zeros(A.shape[0], B.shape[0], dtype=A.dtype, device=A.device)
    for start in range(0, A.shape[1], 64):
        total = total + (A[:, start : start + 64].float() @ B[:, start : start + 64].float().T).to(A.dtype)
    return total


def gemm_for_whole_tiles(A, B):
    """Rows beyond the last whole tile of 16 get the values of the tile before."""
    result = right_gemm(A, B)
    rest = len(A) % 16
    if rest:
        result[-rest:] = 0
    return result


def silu_without_up(gate_up):
    """Forgets the second factor."""
    gate, _ = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).to(gate_up.dtype)


def silu_by_relu(gate_up):
    """relu, which is close to silu for large gates."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate.relu() * up).to(gate_up.dtype)


def quantised_toward_zero(x):
    """Truncates codes instead of rounding them: each within one code."""
    groups = x.float().unflatten(1, (-1, 128)) if x.shape[1] % 128 == 0 else x.float().unflatten(1, (2, -1))
    scales = groups.abs().amax(dim=2).clamp_min(1e-10) / 448.0
    exact = groups / scales[:, :, None]
    codes = exact.to(torch.float8_e4m3fn)
    bits = codes.view(torch.uint8).to(torch.int16)
    smaller = (bits - (codes.float().abs() > exact.abs()).to(torch.int16)).to(torch.uint8)
    return smaller.view(torch.float8_e4m3fn).flatten(1), scales
