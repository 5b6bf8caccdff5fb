"""What the recipes make unsupported, with the reason, because SGLang runs it in another way or not at all."""

from __future__ import annotations

import json

import pytest
from plans import plan_of

import flashinfer_trace

ROOT = flashinfer_trace.find_root()


def of_dataset(name, **changes):
    """What `plan_of` finds for a model of the dataset, whose configuration has other fields."""
    path = ROOT / "models" / f"{name}.json"
    return plan_of(path, {**json.loads(path.read_text())["config"], **changes})


@pytest.mark.parametrize("size", [80, 96, 120])
def test_heads_of_sizes_that_the_kernels_do_not_take(size):
    ops, unsupported, _ = of_dataset("llama-3.1-8b", head_dim=size)
    assert not {"attn", "rotary_emb"} & set(ops) and {"qkv_proj", "o_proj"} <= set(ops)
    assert f"SGLang calls for heads of {size} features, because it reads a bfloat16 cache" in unsupported["rotary_emb"]
    assert f"take heads of 64, 128 and 256 features, not of {size}" in unsupported["attn"]


@pytest.mark.parametrize("size", [64, 128, 256])
def test_heads_of_sizes_that_the_kernels_take(size):
    assert {"attn", "rotary_emb"} <= set(of_dataset("llama-3.1-8b", head_dim=size)[0])


def test_the_rotary_embedding_takes_larger_heads_than_attention():
    ops, unsupported, _ = of_dataset("llama-3.1-8b", head_dim=512)
    assert "rotary_emb" in ops and "attn" in unsupported


def test_the_rotary_part_of_latent_attention_has_a_size_that_the_kernels_take():
    ops, unsupported, _ = of_dataset("deepseek-v3", qk_rope_head_dim=32)
    assert "rotary_emb" not in ops and "heads of 32 features" in unsupported["rotary_emb"]
