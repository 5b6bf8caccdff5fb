"""Models for the extraction that are small enough to read."""

from __future__ import annotations

import json

#: A dense model with grouped-query attention, small enough to read.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
#: A mixture of experts, routed by a softmax.
SPARSE = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


#: A mixture of experts with latent attention.
MIXTURE = {
    **TINY,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2},
    **{"first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def add_model(root, name, title, config):
    """Writes models/<name>.json, with what the schema demands and no kernel depends on."""
    source, checked = {"repository": "nobody/nothing", "file": "config.json"}, "Nothing: it is made up for a test."
    config = {"rope_theta": 10000.0, "torch_dtype": "bfloat16", **config}
    text = json.dumps({"name": name, "title": title, "source": source, "checked": checked, "config": config})
    (root / "models" / f"{name}.json").write_text(text)


def load_definition(root, path):
    """The JSON of a Definition, by its path below definitions/."""
    return json.loads((root / "definitions" / path).read_text())
