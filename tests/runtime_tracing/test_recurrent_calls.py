"""Calls of models with linear attention: each has the Definitions of its own sizes and settings, and no others."""

from __future__ import annotations

import dataclasses

import pytest
from whole_dataset import with_calls

from flashinfer_trace import find_root
from tools.extract.matched import Dataset, State
from tools.runtime_tracing.recording import RecordedCall, read

ROOT = find_root()


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return with_calls()


def calls(run: str, ending: str, text: str = "") -> list[RecordedCall]:
    """The calls of a dry run whose kernel's path ends so, and whose arguments have a text."""
    found = read(ROOT / "traces" / "dry" / f"{run}.json").calls
    return [one for one in found if one.kernel.endswith(ending) and text in one.arguments]


@pytest.mark.parametrize(
    ("run", "ending", "text", "names"),
    [
        ("qwen3_next_80b_a3b-bf16", ".chunk_gated_delta_rule", "", ["gdn_prefill_qk4_v8_d128_k_last"]),
        ("qwen3_next_80b_a3b-bf16", "_packed_decode", "", ["gdn_packed_decode_qk4_v8_d128"]),
        ("qwen3.5_27b-bf16", "_packed_decode", "", ["gdn_packed_decode_qk16_v48_d128"]),
        ("qwen3_next_80b_a3b-bf16", ".causal_conv1d_fn", "", ["causal_conv1d_c2048_w4"]),
        ("qwen3_next_80b_a3b-bf16", ".causal_conv1d_update", "", ["causal_conv1d_update_c2048_w4"]),
        ("qwen3_next_80b_a3b-bf16", "FusedRMSNormGated.forward", "", ["rmsnorm_silu_gate_d128"]),
        ("qwen3.5_27b-bf16", "layernorm_gated.RMSNorm.forward", "", ["rmsnorm_silu_gate_d128"]),
        ("kimi_linear_48b_a3b-bf16", "FusedRMSNormGated.forward", "", ["rmsnorm_sigmoid_gate_d128_eps1e5"]),
        ("kimi_linear_48b_a3b-bf16", "_kda_packed_decode", "", ["kda_packed_decode_qk16_v16_d128"]),
        ("kimi_linear_48b_a3b-bf16", ".chunk_kda", "v_new: ", ["kda_prefill_qk16_v16_d128"]),
        ("nemotron_3_nano_30b_a3b-bf16", ".selective_state_update", "", ["mamba_ssu_decode_float32_h64_d64_s128_ng8"]),
        # 1 + weight, which FlashInfer computes in a module named after the norm without it.
        ("qwen3_next_80b_a3b-bf16", ".gemma_rmsnorm", "[1979,2048]", ["gemma_rmsnorm_h2048"]),
        # Which features are a pair is in the name of the compiled module.
        (
            "qwen3_next_80b_a3b-bf16",
            ".apply_rope_with_cos_sin_cache_inplace",
            "",
            ["rope_with_cos_sin_cache_neox_style_h4_kv1_d64_rd64"],
        ),
        # Eight requests are not eight experts.
        ("minimax_m2.5-fp8", ".moe_fused_gate", "", ["moe_topk_deepseek_topk8_ng1_kg1_e256"]),
    ],
)
def test_a_call_has_the_definition_of_its_sizes(dataset: Dataset, run: str, ending: str, text: str, names: list[str]):
    found = calls(run, ending, text)
    assert found and [one for one in found if [*dataset.of(one, None)[1]] != names] == []


@pytest.mark.parametrize(
    ("run", "ending", "old", "new"),
    [
        ("qwen3_next_80b_a3b-bf16", ".causal_conv1d_fn", "HAS_BIAS: False", "HAS_BIAS: True"),
        ("qwen3_next_80b_a3b-bf16", "FusedRMSNormGated.forward", "'silu'", "'sigmoid'"),
        ("qwen3_next_80b_a3b-bf16", "FusedRMSNormGated.forward", "eps: 1e-06", "eps: 1e-05"),
        ("qwen3_next_80b_a3b-bf16", "_packed_decode", "mixed_qkv: bfloat16[8,2048]", "mixed_qkv: bfloat16[8,2049]"),
        ("minimax_m2.5-fp8", ".moe_fused_gate", "HAS_BIAS: True", "HAS_BIAS: False"),
        ("minimax_m2.5-fp8", ".moe_fused_gate", "out_indices_ptr: int32[8,8]", "out_indices_ptr: int32[8,6]"),
    ],
)
def test_another_setting_or_size_has_no_definition(dataset: Dataset, run: str, ending: str, old: str, new: str):
    found = [dataclasses.replace(one, arguments=one.arguments.replace(old, new)) for one in calls(run, ending, old)]
    named = [name for one in found for name in dataset.of(one, None)[1]]
    assert found and named == []


def test_the_sizes_of_a_missing_definition_are_found_by_the_names_of_tensors(dataset: Dataset):
    (call, *_) = calls("qwen3_next_80b_a3b-bf16", "_packed_decode")
    wide = (
        call.arguments.replace("[8,2048]", "[8,4096]").replace("8,128,128]", "24,128,128]").replace("[8,8]", "[8,24]")
    )
    state, names, sizes, _ = dataset.of(dataclasses.replace(call, arguments=wide), None)
    assert state is State.NEW_SIZE and names == ("gdn_packed_decode_qk4_v24_d128",)
    assert sizes[names[0]][1] == {"num_k_heads": 4, "num_v_heads": 24, "head_size": 128, "qkv_size": 4096}
