"""Models of the dataset with other fields: what their code does not do is unsupported, with the reason."""

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


#: How experts are chosen: fields of a model of the dataset -> the reason why no family with routing covers it. The code
#: of DeepSeek has a bias, and a sigmoid with it, only for the topk_method noaux_tc; that of GLM-4.5 always has one.
NOT_ROUTED = [
    ("deepseek-v3", {"topk_method": "group_limited_greedy"}, "a softmax with topk_method group_limited_greedy"),
    ("deepseek-v3", {"topk_method": None}, "the code needs the field topk_method"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "a sigmoid with topk_method noaux_tc, and scoring_func is softmax"),
    ("deepseek-v3", {"norm_topk_prob": False}, "whose weights are not divided by their sum (norm_topk_prob false)"),
    ("deepseek-v3", {"norm_topk_prob": None}, "needs the field norm_topk_prob"),
    ("kimi-k2", {"topk_method": "greedy"}, "a softmax with topk_method greedy, and scoring_func is sigmoid"),
    ("kimi-k2", {"num_experts_per_tok": 16}, "take at most 512 experts and choose at most 8, not 16 of 384"),
    (
        *("deepseek-v2-lite", {"scoring_func": "sigmoid", "norm_topk_prob": True}),
        "a softmax with topk_method greedy, and scoring_func is sigmoid",
    ),
    ("glm-4.5", {"topk_method": "greedy"}, "chooses experts with a correction bias, and topk_method is greedy"),
]


@pytest.mark.parametrize(("name", "changes", "reason"), NOT_ROUTED)
def test_routing_is_claimed_only_as_the_code_routes(name, changes, reason):
    before, _, _ = of_dataset(name)
    assert [op for op, found in before.items() if "moe" in found]
    ops, unsupported, _ = of_dataset(name, **changes)
    assert not [op for op, found in ops.items() if "moe" in found]
    assert reason in unsupported["topk"] and "experts" in unsupported
    assert {op: found for op, found in ops.items() if op not in ("topk", "experts")} == {
        op: found for op, found in before.items() if op not in ("topk", "experts")
    }


LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
DENSE = {"act_fn", "gate_up_proj", "down_proj"}
UNREAD = "the code does not read the field that gives the configuration "
#: Fields of a model of the dataset -> the ops that they need, which its code or its trace does not have.
LACKING = [
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, DENSE, f"{UNREAD}the dense layers (decoder_sparse_step 2)"),
    ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, DENSE, f"{UNREAD}the dense layers (mlp_only_layers [0])"),
    ("qwen2-57b-a14b", {"mlp_only_layers": [0]}, DENSE, f"{UNREAD}the dense layers (mlp_only_layers [0])"),
    ("qwen2-57b-a14b", {"n_shared_experts": 2}, DENSE, f"{UNREAD}the 2 shared experts (n_shared_experts 2)"),
    (
        *("qwen3-30b-a3b", {"shared_expert_intermediate_size": 1024}, DENSE | {"shared_expert_gate"}),
        "the shared expert",
    ),
    ("deepseek-v3", {"q_lora_rank": None}, {"q_proj", "kv_a_proj_with_mqa"}, "the configuration needs "),
    ("deepseek-v3", {"kv_lora_rank": None}, {"attn", "qkv_proj"}, "the configuration needs "),
    ("llama-3.1-8b", {"num_experts": 8, "num_experts_per_tok": 2}, {"experts", "topk", "gate"}, "needs "),
    (
        *("llama-3.1-8b", {"kv_lora_rank": 512, **dict.fromkeys(LATENT, 64)}),
        *({"attn_mqa", "kv_a_proj_with_mqa", "kv_a_layernorm", "q_proj", "kv_b_proj"}, "the configuration needs "),
    ),
    (
        *("deepseek-v3", {"first_k_dense_replace": 0, "n_shared_experts": None, "moe_layer_freq": 2}, DENSE),
        "some layers between those with experts are dense (moe_layer_freq 2)",
    ),
]


@pytest.mark.parametrize(("name", "changes", "lacking", "reason"), LACKING)
def test_an_op_that_the_configuration_needs_and_the_model_lacks_is_unsupported(name, changes, lacking, reason):
    before, gaps, _ = of_dataset(name)
    ops, unsupported, skipped = of_dataset(name, **changes)
    assert not lacking & set(gaps) and lacking <= set(unsupported) and not lacking & set(skipped)
    assert [op for op in sorted(lacking) if reason not in unsupported[op]] == []
    claimed = {op: found for op, found in ops.items() if op in lacking}
    assert claimed == {op: found for op, found in before.items() if op in claimed}


def test_the_gate_of_a_shared_expert_that_the_model_lacks_is_not_claimed():
    assert of_dataset("qwen3-30b-a3b", shared_expert_intermediate_size=1024)[0] == of_dataset("qwen3-30b-a3b")[0]
