"""The sizes with which a model's code builds a linear layer, compared with those that the recipe of `gemm` derives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

__all__ = ["other_sizes"]

_HIDDEN = frozenset({"hidden_size"})
_QUERIES = frozenset({"num_heads * head_dim", "head_dim * num_heads"})
#: How many experts there are. Classes such as MoEGate take the configuration instead.
_EXPERTS = frozenset({"num_experts", "n_routed_experts", "num_local_experts"})
#: Op -> what each argument may be, in order.
SIZES = {
    "qkv_proj": (_HIDDEN, frozenset({"head_dim"}), frozenset({"num_heads"}), frozenset({"num_kv_heads"})),
    "o_proj": (_QUERIES, _HIDDEN),
    "gate_up_proj": (_HIDDEN, frozenset({"[intermediate_size] * 2", "2 * [intermediate_size]"})),
    "down_proj": (frozenset({"intermediate_size"}), _HIDDEN),
    "gate": (_HIDDEN, _EXPERTS),
    "router": (_HIDDEN, _EXPERTS),
    "q_proj": (_HIDDEN, frozenset({"num_heads * qk_head_dim"})),
    "q_b_proj": (frozenset({"q_lora_rank"}), frozenset({"num_heads * qk_head_dim"})),
    "kv_a_proj_with_mqa": (_HIDDEN, frozenset({"kv_lora_rank + qk_rope_head_dim"})),
    "fused_qkv_a_proj_with_mqa": (_HIDDEN, frozenset({"q_lora_rank + kv_lora_rank + qk_rope_head_dim"})),
}
#: Where attention is latent, values have features of their own.
LATENT = {"o_proj": (frozenset({"num_heads * v_head_dim"}), _HIDDEN)}
#: Names of these arguments -> their places.
PLACES = {
    **{"hidden_size": 0, "head_size": 1, "total_num_heads": 2, "total_num_kv_heads": 3},
    **{"input_size": 0, "output_size": 1, "output_sizes": 1},
}
#: Where a size is kept, which does not tell them apart.
_KEPT = re.compile(r"\b(?:self\.|config\.|total_(?=num_))+")
#: One size has several names.
_NAMES = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_size": "head_dim"}


def other_sizes(op: str, call: ast.Call, latent: bool) -> Iterator[str]:
    """The arguments of a call that builds a linear layer which are not the sizes that the recipe derives.

    Args:
        op: the attribute that holds the layer.
        call: builds it.
        latent: whether the model's attention is latent.
    """
    sizes = LATENT.get(op, SIZES.get(op)) if latent else SIZES.get(op)
    if sizes is None:
        return
    given = {place: ast.unparse(argument) for place, argument in enumerate(call.args)}
    given |= {PLACES[keyword.arg]: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg in PLACES}
    for place, text in sorted(given.items()):
        if place >= len(sizes) or _plain(text) not in sizes[place]:
            yield text


def _plain(text: str) -> str:
    """A text without the places where sizes are kept, with one name for each."""
    plain = _KEPT.sub("", text)
    for other, name in _NAMES.items():
        plain = re.sub(rf"\b{other}\b", name, plain)
    return plain
