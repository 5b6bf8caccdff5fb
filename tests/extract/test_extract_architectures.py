"""What the command extracts from architectures: latent attention, partial rotation, mixtures of experts."""

from __future__ import annotations

import json

import pytest
from small_models import MIXTURE, SPARSE, TINY, add_model, load_definition


def test_page_sizes_and_latent_attention(root, extract, snapshot):
    add_model(root, "experts", "Experts", MIXTURE)
    assert extract("--model-name", "experts", "--tp", 2, "--page-sizes", 16, "--execution-modes", "decode")[0] == 0
    paged = [path for path in snapshot() if path.startswith("mla_paged/")]
    assert paged == ["mla_paged/mla_paged_decode_h4_ckv16_kpe4_ps16.json"]
    assert load_definition(root, paged[0])["axes"]["page_size"]["value"] == 16
    assert "1/sqrt(12)" in load_definition(root, paged[0])["inputs"]["sm_scale"]["description"]


def test_a_hugging_face_configuration(root, extract, snapshot, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "torch_dtype": "bfloat16", "hidden_size": 256}))
    assert extract("--model-name", "my_model", "--config", path)[0] == 0
    assert "rmsnorm/rmsnorm_h256.json" in snapshot()
    assert "model:my-model" in load_definition(root, "rmsnorm/rmsnorm_h256.json")["tags"]


def test_a_part_of_each_head_is_rotated(root, extract, snapshot):
    add_model(root, "part", "Part", {**TINY, "partial_rotary_factor": 0.5, "attention_bias": True})
    assert extract("--model-name", "part", "--tp", 1)[0] == 0
    rope = load_definition(root, "rope/rope_with_cos_sin_cache_neox_style_h8_kv2_d64_rd32.json")
    assert rope["axes"]["rotary_dim"]["value"] == 32
    assert "features i and i + 16 of each head" in rope["description"]
    assert "the first 32 features of each head rotated" in rope["description"]
    qkv = load_definition(root, "gemm/gemm_bf16_bias_n768_k64.json")
    assert qkv["description"].endswith("In Part: qkv_proj ((8 query + 2 x 2 key-value heads) x 64) at TP 1.")
    assert list(qkv["inputs"]) == ["A", "B", "bias"]


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, False),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1, "shared_expert_intermediate_size": 0}, False),
        ({"first_k_dense_replace": 0, "n_shared_experts": 0}, False),
        ({"first_k_dense_replace": 1}, True),
    ],
)
def test_dense_layers_of_a_mixture_of_experts(extract_config, snapshot, changes, dense):
    # The code of Qwen's mixtures of experts has no dense layers, whatever their configurations say.
    one_group = {"n_group": 1, "topk_group": 1}
    config = {**SPARSE, "architectures": ["Glm4MoeForCausalLM"], **one_group, **changes}
    status, _, err = extract_config("sparse", config, "--tp", 1)
    assert status == 0, err
    assert ("gemm/gemm_bf16_n64_k96.json" in snapshot()) is dense
    assert ("activation/silu_and_mul_i96.json" in snapshot()) is dense


def test_a_configuration_with_zero_experts_is_dense(extract_config, snapshot):
    config = {**SPARSE, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 0}
    status, _, err = extract_config("dense", config, "--tp", 1)
    assert status == 0, err
    assert "activation/silu_and_mul_i96.json" in snapshot()
    assert not [path for path in snapshot() if path.startswith("moe/")]


def test_descriptions_of_experts_say_how_they_are_split(root, extract):
    add_model(root, "sparse", "Sparse", {**SPARSE, "shared_expert_intermediate_size": 32})
    assert extract("--model-name", "sparse", "--ep", 4, 16, "--tp", 1, 8, "--no-include-quantized")[0] == 0

    def description(local, width):
        path = f"moe/moe_bf16_softmax_routing_topk2_e{local}_h64_i{width}.json"
        return load_definition(root, path)["description"]

    routing = "softmax routing over 16 experts (2 per token, weights scaled to sum to 1)"
    ends = "The shared expert is not included."
    add = "in bfloat16. The outputs of the ranks add up to that of the layer."
    experts = "he routed experts of Sparse"
    assert description(16, 32) == (
        f"T{experts} on a single GPU: {routing}, then their SwiGLU MLPs, in bfloat16. {ends}"
    )
    assert description(16, 4) == (
        f"One rank's share of t{experts} under tensor parallelism over 8 ranks, which splits the intermediate features "
        f"of each expert: {routing}, then their SwiGLU MLPs, {add} {ends}"
    )
    assert description(4, 32) == (
        f"One rank's share of t{experts} under expert parallelism over 4 ranks: {routing}, then the SwiGLU MLPs of the "
        f"4 local experts, {add} {ends}"
    )
    assert "then the SwiGLU MLP of the local expert, in bfloat16." in description(1, 32)


FP8_EXPERTS = "moe_fp8_block_scale_softmax_routing_topk2_e4_h128_i128"
BF16_EXPERTS = "moe_bf16_softmax_routing_topk2_e4_h128_i128"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (None, [], {BF16_EXPERTS}),
        (BLOCKS, [], {FP8_EXPERTS}),
        (None, [BLOCKS], {BF16_EXPERTS, FP8_EXPERTS}),
        ({**BLOCKS, "weight_block_size": [64, 64]}, [], set()),
    ],
)
def test_experts_are_extracted_in_the_numbers_that_are_published(root, extract, snapshot, own, others, expected):
    config = {**SPARSE, "hidden_size": 128, "moe_intermediate_size": 128}
    add_model(root, "sparse", "Sparse", {**config, **({"quantization_config": own} if own else {})})
    path = root / "models" / "sparse.json"
    quantised = [{"repository": "nobody/nothing", "quantization_config": one} for one in others]
    path.write_text(json.dumps({**json.loads(path.read_text()), **({"quantised": quantised} if others else {})}))
    assert extract("--model-name", "sparse", "--ep", 4)[0] == 0
    names = {path.rpartition("/")[2].removesuffix(".json") for path in snapshot()}
    assert {name for name in names if "_e4_" in name and "_routing_" in name} == expected


def test_experts_are_not_split_over_ranks_that_do_not_divide_the_heads(root, extract, snapshot):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    add_model(root, "sparse", "Sparse", {**SPARSE, **heads})
    status, _, err = extract("--model-name", "sparse")
    assert status == 0 and "left out: TP 8 does not divide the 6 query heads" in err
    assert "moe/moe_bf16_softmax_routing_topk2_e16_h64_i32.json" in snapshot()
    assert "moe/moe_bf16_softmax_routing_topk2_e16_h64_i4.json" not in snapshot()
    assert "tp:8" not in load_definition(root, "moe/moe_topk_softmax_topk2_e16.json")["tags"]
