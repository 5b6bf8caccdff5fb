"""Rotary position embedding, from a cache of cosines and sines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.words import const, document, plural, tensor, uses, var

TENSOR_PARALLEL = (1, 2, 4, 8)
KERNELS = frozenset({"sgl-kernel:apply_rope_with_cos_sin_cache_inplace", "sgl-kernel:rotary_embedding"})
TAGS = (
    "fi_api:flashinfer.rope.apply_rope_with_cos_sin_cache",
    "fi_api:flashinfer.rope.apply_rope_with_cos_sin_cache_inplace",
    "sgl_api:sgl_kernel.apply_rope_with_cos_sin_cache_inplace",
    "sgl_api:sgl_kernel.rotary_embedding",
)
NEOX, INTERLEAVED = "rope_with_cos_sin_cache_neox_style", "rope_with_cos_sin_cache_gptj_style"


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    if not (stages := request.stages("rotary_emb", KERNELS)):
        return
    for size in request.tensor_parallel(TENSOR_PARALLEL):
        heads = model.size("num_attention_heads") // size
        if model.is_latent:  # only the part with the position is rotated, and all heads share one key
            family, kv_heads, dim = INTERLEAVED, 1, model.size("qk_rope_head_dim")
        else:
            family, kv_heads, dim = NEOX, max(1, model.size("num_key_value_heads") // size), model.head_dim
        rotated = int(dim * model.number("partial_rotary_factor")) if "partial_rotary_factor" in model else dim
        axes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_size": dim, "rotary_dim": rotated}
        yield Need(family, axes, Use(model, "rotary_emb", tp=size), stages)


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    heads, kv_heads, rotated = axes["num_qo_heads"], axes["num_kv_heads"], axes["rotary_dim"]
    if family == NEOX:
        what = "of query and key"
        pairs = f"features i and i + {rotated // 2} of a head turn together (NeoX style)"
    else:
        what = (
            "of the part of query and key that carries the position in latent attention, the key's shared by all heads"
        )
        pairs = "features 2 i and 2 i + 1 turn together (interleaved, GPT-J style)"
    how_many = f"all {rotated} features" if rotated == axes["head_size"] else f"the first {rotated} features of a head"
    description = (
        f"Rotary position embedding in bf16 {what}, from a float32 cache of cosines and sines: {pairs}. "
        f"{plural(heads, 'query head')} and {plural(kv_heads, 'key head')} a rank, {how_many} rotated. "
        f"{uses(needs)}"
    )
    dimensions = {
        "num_tokens": var("All tokens of the batch."),
        "max_seq_len": var("Positions that the cache covers."),
        "num_qo_heads": const(heads, "Query heads of a rank."),
        "num_kv_heads": const(kv_heads, "Key heads of a rank."),
        "head_size": const(axes["head_size"], "Features of a head."),
        "rotary_dim": const(rotated, "First features of a head that are rotated; the others are copied."),
    }
    query, key = ["num_tokens", "num_qo_heads", "head_size"], ["num_tokens", "num_kv_heads", "head_size"]
    cache = "Row p: the cosines of position p, then its sines, rotary_dim / 2 each; used as they are."
    position = "Position of each token, 0 to max_seq_len - 1, in any order; tokens may share one."
    inputs = {
        "q": tensor(query, "bfloat16", "Query before rotation."),
        "k": tensor(key, "bfloat16", "Key before rotation."),
        "cos_sin_cache": tensor(["max_seq_len", "rotary_dim"], "float32", cache),
        "positions": tensor(["num_tokens"], "int64", position),
    }
    outputs = {
        "q_out": tensor(query, "bfloat16", "Rotated query. In-place kernels write it over q."),
        "k_out": tensor(key, "bfloat16", "Rotated key. In-place kernels write it over k."),
    }
    return document(description, needs, TAGS, dimensions, inputs, outputs)


RECIPE = Recipe("rope", (NEOX, INTERLEAVED), KERNELS, needs, describe)
