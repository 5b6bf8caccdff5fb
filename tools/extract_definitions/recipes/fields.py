"""Fields of a configuration that recipes understand, by what they decide. A recipe may read no others."""

from __future__ import annotations

from tools.extract_definitions.models import QUANTIZATION

#: Numbers of heads, and whether heads share latents.
HEADS = frozenset({"num_attention_heads", "num_key_value_heads", "kv_lora_rank"})
GROUPED = HEADS | {"head_dim", "hidden_size"}
#: What attention is beside plain attention.
VARIANT = frozenset({"attn_logit_softcapping", "sliding_window", "use_sliding_window", "layer_types"})
LATENT = HEADS | {"q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "index_topk"}
#: Sizes of dense layers, shared experts and routed experts, and how many experts there are.
WIDTHS = frozenset(
    {
        *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
        *("n_routed_experts", "num_experts", "num_local_experts", "n_shared_experts"),
        *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_layer_freq"),
    }
)
#: How experts are chosen and in which numbers they are stored.
ROUTING = frozenset(
    {
        *("num_experts_per_tok", "n_group", "topk_group", "scoring_func", "topk_method", "norm_topk_prob"),
        *("routed_scaling_factor", *QUANTIZATION),
    }
)
ROTARY = frozenset({"partial_rotary_factor", "rope_scaling", "rope_parameters"})
