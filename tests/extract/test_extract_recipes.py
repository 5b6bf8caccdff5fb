"""What the recipes make unsupported, with the reason, because SGLang runs it in another way or not at all."""

from __future__ import annotations

import json
import re

import pytest
from plans import plan_of

import flashinfer_trace
from tools.extract_definitions.errors import ExtractionError

ROOT = flashinfer_trace.find_root()


def of_dataset(name, **changes):
    """What `plan_of` finds for a model of the dataset, whose configuration has other fields."""
    path = ROOT / "models" / f"{name}.json"
    return plan_of(path, {**json.loads(path.read_text())["config"], **changes})


@pytest.mark.parametrize("size", [80, 96, 120])
def test_heads_of_sizes_that_the_kernels_do_not_take(size):
    ops, unsupported, _ = of_dataset("llama-3.1-8b", head_dim=size)
    assert not {"attn", "rotary_emb"} & set(ops) and {"qkv_proj", "o_proj"} <= set(ops)
    assert f"kernel for heads of {size} features reads a bfloat16 cache" in unsupported["rotary_emb"]
    assert f"FlashInfer's kernels take no heads of {size} features" in unsupported["attn"]


@pytest.mark.parametrize("size", [64, 128, 256])
def test_heads_of_sizes_that_the_kernels_take(size):
    assert {"attn", "rotary_emb"} <= set(of_dataset("llama-3.1-8b", head_dim=size)[0])


def test_the_rotary_embedding_takes_larger_heads_than_attention():
    ops, unsupported, _ = of_dataset("llama-3.1-8b", head_dim=512)
    assert "rotary_emb" in ops and "attn" in unsupported


def test_the_rotary_part_of_latent_attention_has_a_size_that_the_kernels_take():
    ops, unsupported, _ = of_dataset("deepseek-v3", qk_rope_head_dim=32)
    assert "rotary_emb" not in ops and "heads of 32 features" in unsupported["rotary_emb"]


ATTENTION = {"attn", "qkv_proj", "o_proj", "rotary_emb"}
WINDOW = ["full_attention"] * 26
#: Fields that the code of a model does not read -> the ops that they would change, and a part of the reason.
UNREAD = [
    ("mixtral-8x7b", {"head_dim": 64}, ATTENTION, "the code does not read head_dim"),
    ("qwen2-57b-a14b", {"head_dim": 64}, ATTENTION, "the code does not read head_dim"),
    ("mixtral-8x7b", {"attention_bias": True}, {"qkv_proj", "o_proj"}, "the code does not read attention_bias"),
    ("mixtral-8x7b", {"qkv_bias": True}, {"qkv_proj"}, "the bias of qkv_proj by qkv_bias"),
    ("mixtral-8x7b", {"moe_intermediate_size": 1024}, {"experts"}, "the code does not read moe_intermediate_size"),
    ("qwen2.5-7b", {"qkv_bias": False}, {"qkv_proj"}, "the bias of qkv_proj by qkv_bias"),
    ("qwen2.5-7b", {"attention_bias": True}, {"o_proj"}, "the code does not read attention_bias"),
    ("llama-3.1-8b", {"qkv_bias": True}, {"qkv_proj"}, "the bias of qkv_proj by qkv_bias"),
    ("qwen3-30b-a3b", {"qkv_bias": True}, {"qkv_proj"}, "the bias of qkv_proj by qkv_bias"),
    ("qwen3-30b-a3b", {"moe_intermediate_size": None}, {"experts"}, "the code needs the field moe_intermediate_size"),
    ("gemma-2-2b", {"layer_types": WINDOW}, {"attn"}, "does not read layer_types"),
    ("llama-3.1-8b", {"sliding_window": 4096}, {"attn"}, "the code does not read sliding_window"),
    ("llama-3.1-8b", {"attn_logit_softcapping": 50.0}, {"attn"}, "the code does not read attn_logit_softcapping"),
    *(
        ("llama-3.1-8b", {"residual_multiplier": 0.5}, {op}, "the code does not read residual_multiplier")
        for op in ("input_layernorm", "post_attention_layernorm", "norm")
    ),
]


@pytest.mark.parametrize(("name", "changes", "refused", "reason"), UNREAD)
def test_a_field_that_the_code_does_not_read_and_that_says_otherwise(name, changes, refused, reason):
    ops, unsupported, _ = of_dataset(name, **changes)
    assert not refused & set(ops) and refused <= set(of_dataset(name)[0])
    assert [op for op in refused if reason not in unsupported[op]] == []


#: Fields that the code of a model does not read, with values that change nothing.
SAME = [
    ("mixtral-8x7b", {"head_dim": 128, "attention_bias": False, "qkv_bias": False, "moe_intermediate_size": 14336}),
    ("qwen2.5-7b", {"head_dim": 128, "qkv_bias": True}),
    ("qwen2.5-7b", {"sliding_window": 4096, "use_sliding_window": False}),
    ("qwen3-30b-a3b", {"qkv_bias": False}),
    ("qwen2-57b-a14b", {"qkv_bias": True}),
    ("gemma-2-2b", {"layer_types": ["sliding_attention", "full_attention"] * 13}),
    ("llama-3.1-8b", {"layer_types": ["full_attention"] * 32, "attn_logit_softcapping": 0, "residual_multiplier": 1}),
    ("llama-3.1-8b", {"sliding_window": 131072, "max_position_embeddings": 131072}),
]


@pytest.mark.parametrize(("name", "changes"), SAME)
def test_a_field_that_the_code_does_not_read_and_that_says_the_same(name, changes):
    assert of_dataset(name, **changes) == of_dataset(name)


def test_the_code_decides_on_the_bias():
    with_bias, without = (
        of_dataset("qwen2-57b-a14b", qkv_bias=value)[0]["qkv_proj"]["gemm"] for value in (True, False)
    )
    assert all("bias" in name for name in with_bias) and not any("bias" in name for name in without)
    assert of_dataset("qwen2-57b-a14b", qkv_bias=None)[0]["qkv_proj"]["gemm"] == without


def test_a_window_that_no_position_exceeds_is_none():
    plain = of_dataset("gemma-2-2b", sliding_window=None)
    assert of_dataset("gemma-2-2b", sliding_window=8192, max_position_embeddings=8192) == plain
    assert any("window" in name for name in of_dataset("gemma-2-2b")[0]["attn"]["gqa_paged"])


#: How a checkpoint stores fp8 blocks.
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fp8_products(name, **changes):
    """The names of the products in fp8 blocks, and the reasons of other ops."""
    ops, unsupported, _ = of_dataset(name, quantization_config=BLOCKS, **changes)
    found = {op: [one for one in kinds.get("gemm", []) if one.startswith("fp8")] for op, kinds in ops.items()}
    return {op: names for op, names in found.items() if names}, unsupported


def test_each_part_of_a_merged_layer_has_whole_blocks():
    found, _ = fp8_products("qwen3-30b-a3b")
    # On 8 ranks, 4 query heads and a key and a value head of 128 features each.
    assert found["qkv_proj"] == [f"fp8_blockwise_scaled_mm_n{n}_k2048" for n in (5120, 768)]
    narrow, unsupported = fp8_products("qwen3-30b-a3b", head_dim=64, num_attention_heads=32, num_key_value_heads=8)
    # A key head of one rank has 64 features, though all heads together have 384.
    assert narrow["qkv_proj"] == ["fp8_blockwise_scaled_mm_n3072_k2048"] and "qkv_proj" not in unsupported
    none, unsupported = fp8_products("qwen3-30b-a3b", head_dim=64, num_key_value_heads=1)
    assert "qkv_proj" not in none and "blocks of 128 features do not fit into qkv_proj" in unsupported["qkv_proj"]


def test_gate_and_up_have_whole_blocks_each():
    whole, _ = fp8_products("deepseek-v3")
    assert whole["gate_up_proj"] == [f"fp8_blockwise_scaled_mm_n{n}_k7168" for n in (36864, 4096, 4608, 512)]
    found, _ = fp8_products("deepseek-v3", intermediate_size=1536)  # 192 features of gate on each of 8 ranks
    assert found["gate_up_proj"] == [f"fp8_blockwise_scaled_mm_n{n}_k7168" for n in (3072, 4096, 512)]


def test_layers_that_ranks_share_have_whole_blocks_and_others_need_not():
    found, unsupported = fp8_products("deepseek-v3", num_attention_heads=8, v_head_dim=64)
    assert found["q_b_proj"] == ["fp8_blockwise_scaled_mm_n1536_k1536"]  # not a head of 192 features
    assert found["fused_qkv_a_proj_with_mqa"] == ["fp8_blockwise_scaled_mm_n2112_k7168"]
    assert "q_b_proj" not in unsupported


NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
#: Values that no family covers, or that are not there -> the ops that need them, and a part of the reason.
UNCOVERED = [
    ("llama-3.1-8b", {"rms_norm_eps": 1e-12}, NORMS, "have an epsilon of 1e-06 and 1e-05, and rms_norm_eps is 1e-12"),
    ("llama-3.1-8b", {"rms_norm_eps": None}, NORMS, "the code needs the field rms_norm_eps"),
    ("qwen3-8b", {"rms_norm_eps": 1e-12}, {"q_norm", "k_norm", "fused_inplace_qknorm"}, "rms_norm_eps is 1e-12"),
    ("qwen3-8b", {"rms_norm_eps": None}, {"q_norm", "k_norm", "fused_inplace_qknorm"}, "the field rms_norm_eps"),
    ("gemma-2-2b", {"rms_norm_eps": 1e-5}, {"norm"}, "of gemma_fused_add_rmsnorm have an epsilon of 1e-06, and"),
    ("gemma-2-2b", {"attn_logit_softcapping": 30.5}, {"attn"}, "whole numbers for caps (attn_logit_softcapping 30.5)"),
    ("deepseek-v3", {"n_group": None}, {"topk", "experts"}, "the code needs the field n_group"),
    ("deepseek-v3", {"topk_group": None}, {"topk"}, "the code needs the field topk_group"),
]


@pytest.mark.parametrize(("name", "changes", "refused", "reason"), UNCOVERED)
def test_a_value_that_no_family_covers_makes_its_ops_unsupported(name, changes, refused, reason):
    ops, unsupported, _ = of_dataset(name, **changes)
    assert [op for op in refused if reason not in unsupported[op]] == []
    lost = set(of_dataset(name)[0]) - set(ops)
    assert refused <= lost | {"experts"} and "logits_processor" in ops


def test_a_cap_of_zero_is_none():
    plain = of_dataset("gemma-2-2b", attn_logit_softcapping=None)
    assert of_dataset("gemma-2-2b", attn_logit_softcapping=0) == plain


#: Values that no model can have -> a part of the error.
IMPOSSIBLE = [
    ("llama-3.1-8b", {"head_dim": 127}, "llama-3.1-8b.json: head_dim is 127; heads have an even number of features"),
    ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the number of experts, 8"),
    ("deepseek-v3", {"n_group": 7}, "n_group 7 does not divide 256 experts"),
    ("deepseek-v3", {"topk_group": 9}, "topk_group 9 exceeds n_group 8"),
]


@pytest.mark.parametrize(("name", "changes", "message"), IMPOSSIBLE)
def test_a_value_that_no_model_can_have_is_an_error(name, changes, message):
    with pytest.raises(ExtractionError, match=re.escape(message)):
        of_dataset(name, **changes)


@pytest.mark.parametrize("name", ["qwen3-4b", "llama-3.1-8b", "mixtral-8x7b"])
def test_an_architecture_that_is_not_traced_with_fp8_blocks(name):
    _, unsupported = fp8_products(name)
    for op in ("qkv_proj", "o_proj"):
        assert unsupported[op].startswith("no traced configuration of ")
        assert "runs fp8 block weights by a kernel that fp8_blockwise_scaled_mm covers" in unsupported[op]
