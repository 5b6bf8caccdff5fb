"""Multi-head latent attention for prefill, with keys and values expanded from their latents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes import attention
from tools.extract_definitions.recipes.fields import LATENT
from tools.extract_definitions.recipes.gqa_ragged import KERNELS
from tools.extract_definitions.words import const, document, plural, tensor, users

FAMILY = "mla_ragged_prefill_causal"
OP = "attn_mha"


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    if not attention.has_dense_latents(request, OP) or "prefill" not in request.stages(OP, KERNELS):
        return
    for size in request.tensor_parallel(attention.TENSOR_PARALLEL):
        axes = {
            "num_qo_heads": model.size("num_attention_heads") // size,
            "num_kv_heads": model.size("num_attention_heads") // size,
            "qk_dim": model.size("qk_nope_head_dim") + model.size("qk_rope_head_dim"),
            "vo_dim": model.size("v_head_dim"),
        }
        yield Need(FAMILY, axes, Use(model, OP, tp=size), ("prefill",))


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    heads, size, value = axes["num_qo_heads"], axes["qk_dim"], axes["vo_dim"]
    rope = needs[0].use.model.size("qk_rope_head_dim")
    description = (
        "DeepSeek multi-head latent attention with keys and values expanded from their latents, for several new tokens "
        f"per request (prefill), in ragged tensors, causal. {plural(heads, 'head')}, keys of size {size}, values of "
        f"size {value}. "
        f"Queries are aligned with the end of the keys. {users(needs)}"
    )
    parts = f"{size - rope} without position (qk_nope_head_dim) and {rope} rotary (qk_rope_head_dim)"
    sizes = {
        "num_qo_heads": const(heads, "Heads per rank, each with its own queries, keys and values."),
        "num_kv_heads": const(heads, "Key-value heads per rank: as many as query heads."),
        "qk_dim": const(size, f"Features per query and key head: {parts}."),
        "vo_dim": const(value, "Features per value and output head (v_head_dim)."),
    }
    query = "Queries, one request after the other: the part without position, then the rotary part."
    key = "Keys, one request after the other: up-projected latents, then the rotary part, which all heads share."
    scale = (
        f"Scale of the logits: 1/sqrt({size}), times the square of YaRN's magnitude correction in models that extend "
        "their context with it."
    )
    values = "Values, one request after the other: up-projected latents."
    inputs = {
        "q": tensor(["total_q", "num_qo_heads", "qk_dim"], "bfloat16", query),
        "k": tensor(["total_kv", "num_kv_heads", "qk_dim"], "bfloat16", key),
        "v": tensor(["total_kv", "num_kv_heads", "vo_dim"], "bfloat16", values),
        **attention.ragged_offsets(),
        "sm_scale": tensor(None, "float32", scale),
    }
    outputs = attention.outputs("total_q", "vo_dim", "Weighted mean of the values for each query head", decode=False)
    dimensions = attention.ragged_axes(sizes)
    constraints = [*attention.RAGGED_CONSTRAINTS, "num_kv_heads == num_qo_heads"]
    return document(description, needs, ("causal",), dimensions, inputs, outputs, constraints)


RECIPE = Recipe("mla_ragged", (FAMILY,), KERNELS, LATENT, needs, describe)
