"""How functions that SGLang compiles by itself, PyTorch and DeepGEMM are called, on emulations."""

from __future__ import annotations

import math

import pytest
import torch
from emulated_runs import assert_adapter_passes, install

RECIPROCAL_ROOT = math.sqrt(0.5)


def gated(activation):
    def run(gate_up, out):
        assert gate_up.is_contiguous()
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(activation(gate) * up)

    return run


def fake_rope(q, k, cos_sin_cache, positions, *, is_neox, rope_dim=0):
    assert rope_dim == 0
    assert cos_sin_cache.dtype == torch.float32
    half = cos_sin_cache.shape[1] // 2
    cos, sin = (part.unsqueeze(1) for part in cos_sin_cache[positions].split(half, dim=1))
    for states in (q, k):
        turned = states[..., : 2 * half].float()
        x, y = (turned[..., :half], turned[..., half:]) if is_neox else (turned[..., ::2], turned[..., 1::2])
        new = torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-2 if is_neox else -1).flatten(-2)
        states[..., : 2 * half] = new.to(states.dtype)


def fake_rope_store(q, k, v, k_cache, v_cache, cos_sin_cache, positions, out_loc, *, is_neox, rope_dim=0):
    v = v.view_as(k)
    assert q.shape[-1] == k.stride(1) == cos_sin_cache.shape[1]
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.shape[1] == k.shape[1] * k.shape[2]
    assert positions.dtype == out_loc.dtype
    fake_rope(q, k, cos_sin_cache, positions, is_neox=is_neox, rope_dim=rope_dim)
    k_cache[out_loc], v_cache[out_loc] = k.flatten(1), v.flatten(1)


def fake_product(a, b, d):
    assert not b.is_contiguous(), "a view of weights with one row per output feature"
    d.copy_(a.float() @ b.float())


ACTIVATION, ROPE = "sglang.kernels.ops.activation.activation", "sglang.kernels.ops.attention.rope"
FAKES = {
    f"{ACTIVATION}.silu_and_mul": gated(torch.nn.functional.silu),
    f"{ACTIVATION}.gelu_and_mul": gated(lambda gate: gate * (1 + torch.erf(gate * RECIPROCAL_ROOT)) / 2),
    f"{ACTIVATION}.gelu_tanh_and_mul": gated(lambda gate: torch.nn.functional.gelu(gate, approximate="tanh")),
    f"{ROPE}.apply_rope_with_cos_sin_cache_inplace": fake_rope,
    f"{ROPE}.apply_rope_inplace_with_kvcache": fake_rope_store,
    "deep_gemm.bf16_gemm_nn": fake_product,
}


@pytest.fixture
def kernels(monkeypatch):
    install(monkeypatch, FAKES)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("silu_and_mul_i14336", f"{ACTIVATION}.silu_and_mul"),
        ("gelu_and_mul_i18432", f"{ACTIVATION}.gelu_and_mul"),
        ("gelu_tanh_and_mul_i14336", f"{ACTIVATION}.gelu_tanh_and_mul"),
        ("rope_with_cos_sin_cache_neox_style_h32_kv8_d128_rd128", f"{ROPE}.apply_rope_with_cos_sin_cache_inplace"),
        ("rope_with_cos_sin_cache_gptj_style_h128_kv1_d64_rd64", f"{ROPE}.apply_rope_with_cos_sin_cache_inplace"),
        ("rope_with_cos_sin_cache_neox_style_store_h64_kv4_d128", f"{ROPE}.apply_rope_inplace_with_kvcache"),
        ("gemm_bf16_n6144_k4096", "deep_gemm.bf16_gemm_nn"),
        ("gemm_bf16_n256_k7168", "torch.matmul"),
        ("gemm_bf16_bias_n4608_k3584", "torch.nn.functional.linear"),
        ("gemm_float32_n160_k5120", "torch.nn.functional.linear"),
        ("bmm_bf16_b128_n512_k128", "torch.bmm"),
    ],
)
def test_kernels_are_called_as_their_libraries_want(name: str, path: str, kernels) -> None:
    assert_adapter_passes(name, path, examples=20)
