"""The settings under which an op computes what a Definition of an op_type says: what the model's code may pass.

Every argument is listed. One that is not listed, a module of another class or another call makes a claim unsupported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

LINEAR = frozenset(
    {
        *("QKVParallelLinear", "RowParallelLinear", "ColumnParallelLinear", "MergedColumnParallelLinear"),
        *("ReplicatedLinear",),
    }
)
ATTENTION = frozenset({"attn", "attn_mha", "attn_mqa"})
#: The norms that the layer communicator calls, with the residual, in these ops.
COMMUNICATED = ("prepare_attn", "prepare_mlp", "prepare_attn_and_capture_last_layer_outputs")
_PLACE = frozenset({"prefix", "quant_config", "tp_rank", "tp_size", "tp_group", "params_dtype", "layer_id"})


@dataclass(frozen=True)
class Settings:
    """What one module may be and take.

    Attributes:
        by: the classes or functions that may build it.
        takes: arguments that may have any value: sizes, which the recipe derives, and places.
        decided: argument -> the fields of the configuration that decide it; they must have neutral values.
        literal: argument -> the texts that it may have.
        required: arguments that must be there, because their default is another one.
        first: the texts that the first positional argument may have; empty for any.
        called: keyword arguments that calls may pass; None for any.
    """

    by: frozenset[str]
    takes: frozenset[str] = frozenset()
    decided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    literal: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    first: tuple[str, ...] = ()
    called: frozenset[str] | None = None


#: What logit_cap is where the configuration has one.
CAPPED = ("self.config.attn_logit_softcapping", "config.attn_logit_softcapping")
_ATTENTION = Settings(
    by=frozenset({"RadixAttention"}),
    takes=_PLACE | {"num_heads", "head_dim", "scaling", "num_kv_heads"},
    decided={
        "logit_cap": ("attn_logit_softcapping",),
        "sliding_window_size": ("sliding_window", "layer_types"),
    },
    literal={"logit_cap": ("0.0", "None"), "sliding_window_size": ("-1", "None")},
    called=frozenset({"save_kv_cache", "q_rope", "k_rope", "topk_indices"}),
)
#: Attention whose families say which cap, window and sinks it has: some layers have a window, the others none.
_VARIANT = replace(
    _ATTENTION,
    decided={},
    literal={
        "logit_cap": (*_ATTENTION.literal["logit_cap"], *CAPPED),
        "sliding_window_size": (
            *_ATTENTION.literal["sliding_window_size"],
            "get_attention_sliding_window_size(config) if use_sliding_window else None",
            "sliding_window_size if use_sliding_window else -1",
        ),
    },
    called=frozenset({"sinks"} | (_ATTENTION.called or frozenset())),
)
#: Fields that decide nothing beside what the families of such attention say.
EXPRESSED = frozenset({"attn_logit_softcapping", "sliding_window", "layer_types"})
_LATENT = Settings(_ATTENTION.by, _ATTENTION.takes | {"v_head_dim"}, called=_ATTENTION.called)
_ROPE = frozenset({"rotary_dim", "max_position", "base", "rope_scaling", "device", "dtype", "partial_rotary_factor"})
_GET_ROPE = frozenset({"get_rope", "get_rope_wrapper"})
_NEOX = Settings(
    _GET_ROPE,
    _ROPE,
    {"dual_chunk_attention_config": ("dual_chunk_attention_config",), "is_neox_style": ("rope_is_neox_style",)},
    {"is_neox_style": ("True",)},
)
_INTERLEAVED = Settings(_GET_ROPE, _ROPE, {}, {"is_neox_style": ("False",)}, frozenset({"is_neox_style"}))
#: Settings that apply only where a run must repeat training, bit for bit.
_NORM_SETTINGS = ("norm_kwargs",)
_EPSILON = ("config.rms_norm_eps", "self.config.rms_norm_eps", "rms_norm_eps")


def _norm(*first: str, by: str = "RMSNorm") -> Settings:
    takes = frozenset(f"**{name}" for name in _NORM_SETTINGS)
    return Settings(frozenset({by}), takes, literal={"eps": _EPSILON}, required=frozenset({"eps"}), first=first)


_HIDDEN = ("config.hidden_size", "self.config.hidden_size", "self.hidden_size", "hidden_size")
_HIDDEN_NORM, _GEMMA_NORM = _norm(*_HIDDEN), _norm(*_HIDDEN, by="GemmaRMSNorm")
#: What a norm of queries or keys runs over, if it is all heads of a token together (OLMo-2).
ALL_HEADS = ("self.config.hidden_size", "self.total_num_kv_heads * self.head_dim")
_HEAD_NORM, _EITHER_NORM = _norm("self.head_dim", "head_dim"), _norm("self.head_dim", "head_dim", *ALL_HEADS)
_NORMS = {
    "q_norm": _EITHER_NORM,
    "k_norm": _EITHER_NORM,
    "q_a_layernorm": _norm("self.q_lora_rank"),
    "kv_a_layernorm": _norm("self.kv_lora_rank"),
}
_LAYER = _PLACE | {
    *("input_size", "output_size", "output_sizes", "hidden_size", "head_size", "total_num_heads", "total_num_kv_heads"),
    *("reduce_results", "gather_output", "skip_bias_add"),
}
_LINEAR = Settings(LINEAR, _LAYER, {"bias": ("attention_bias", "bias")}, {"bias": ("False",)}, frozenset({"bias"}))
_FEED_FORWARD = Settings(LINEAR, _LAYER, {"bias": ("mlp_bias", "bias")}, _LINEAR.literal, _LINEAR.required)
#: Layers of which the recipe says whether they add a bias: by attention_bias, and by what the code passes.
_EITHER_BIAS = Settings(LINEAR, _LAYER, {"bias": ("bias",)}, {"bias": ("True", "False")})
_ROUTER = Settings(
    _LINEAR.by | {"MoEGate", "Glm4MoeGate"}, _LAYER | {"config", "is_nextn"}, _LINEAR.decided, _LINEAR.literal
)
_OUTPUT_HEAD = Settings(frozenset({"LogitsProcessor"}), frozenset({"config", "skip_all_gather"}))
_SOFTMAX = Settings(
    frozenset({"TopK"}),
    frozenset({"top_k", "layer_id"}),
    literal={"renormalize": ("config.norm_topk_prob", "True"), "use_grouped_topk": ("False",)},
    called=frozenset({"hidden_states", "router_logits", "num_token_non_padded", "expert_location_dispatch_info"}),
)
_BIASED = Settings(
    _SOFTMAX.by,
    _SOFTMAX.takes
    | {
        *("num_expert_group", "topk_group", "num_fused_shared_experts", "quant_config", "output_format"),
        *("routed_scaling_factor", "apply_routed_scaling_factor_on_output", "fused_shared_experts_scaling_factor"),
    },
    literal={
        "renormalize": _SOFTMAX.literal["renormalize"],
        "use_grouped_topk": ("True",),
        "correction_bias": ("self.gate.e_score_correction_bias",),
    },
    required=frozenset({"correction_bias", "use_grouped_topk"}),
    called=_SOFTMAX.called,
)
#: The code of DeepSeek with the greedy topk_method: one group, and no bias, because the gate has none then.
_ONE_GROUP = replace(_BIASED, required=frozenset({"use_grouped_topk"}))
_EXPERTS = Settings(
    frozenset({"FusedMoE", "get_moe_impl_class", "experts_type"}),
    _PLACE | {"num_experts", "top_k", "hidden_size", "intermediate_size", "routing_method_type", "reduce_results"},
    {"activation": ("hidden_act",)},
)
#: Routed experts whose routing applies a factor, and may count the shared experts as routed ones.
_SCALED = Settings(
    _EXPERTS.by, _EXPERTS.takes | {"num_fused_shared_experts", "routed_scaling_factor"}, _EXPERTS.decided
)
#: Activations, whose default of GeluAndMul is the approximation by tanh.
ACTIVATIONS = {
    "silu_and_mul": Settings(frozenset({"SiluAndMul"})),
    "gelu_tanh_and_mul": Settings(frozenset({"GeluAndMul"}), literal={"approximate": ("'tanh'",)}),
}


def is_variant(family: str) -> bool:
    """Whether a family is attention with a cap, a window or sinks."""
    return family.startswith("gqa") and family.endswith(("_softcap", "_window", "_sinks"))


def over_all_heads(texts: Iterable[str]) -> bool:
    """Whether code that builds a norm of queries or keys lets it run over all heads of a token together."""
    return any(f"({argument}," in text for text in texts for argument in ALL_HEADS)


def settings(op_type: str, family: str, op: str, one_group: bool = False) -> dict[str, Settings]:
    """Attribute -> what its module must be, for a claim of one op; empty for what no module decides.

    `one_group`: whether the configuration puts all experts into one group, and names no bias of their scores.
    """
    match op_type, op:
        case (("gqa_paged" | "gqa_ragged"), _):
            return {op: _VARIANT if is_variant(family) else _ATTENTION}
        case (("mla_paged" | "mla_ragged"), _):
            return {op: _LATENT}
        case "rope", _:
            return {op: _NEOX if "neox" in family else _INTERLEAVED}
        case "rmsnorm", _ if op in COMMUNICATED:
            return {"input_layernorm": _HIDDEN_NORM, "post_attention_layernorm": _HIDDEN_NORM}
        case "rmsnorm", "fused_inplace_qknorm":
            return {"q_norm": _HEAD_NORM, "k_norm": _HEAD_NORM}
        case "rmsnorm", _ if family.startswith("gemma"):
            return {op: _GEMMA_NORM}
        case "rmsnorm", _:
            return {op: _NORMS.get(op, _HIDDEN_NORM)}
        case "activation", "act_fn":
            return {op: ACTIVATIONS[family]}
        case "activation", _:
            return {"experts": _SCALED}
        case "gemm", "logits_processor":
            return {op: _OUTPUT_HEAD}
        case "gemm", "gate":
            return {op: _ROUTER}
        case "gemm", _:
            if op in ("qkv_proj", "o_proj", "router"):
                return {op: _EITHER_BIAS}
            return {op: _FEED_FORWARD if op in ("gate_up_proj", "down_proj") else _LINEAR}
        case "moe", _:
            routing, experts = (_SOFTMAX, _EXPERTS) if "softmax" in family else (_BIASED, _SCALED)
            if "softmax" in family and one_group:
                routing, experts = _ONE_GROUP, _SCALED
            return {"topk": routing} if op == "topk" else {"topk": routing, "experts": experts}
    return {}
