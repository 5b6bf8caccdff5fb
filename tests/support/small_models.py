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
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
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
}


def add_model(root, name, title, config):
    """Writes models/<name>.json."""
    source = {"repository": "nobody/nothing", "file": "config.json"}
    text = json.dumps({"name": name, "title": title, "source": source, "config": config})
    (root / "models" / f"{name}.json").write_text(text)
