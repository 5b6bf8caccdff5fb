"""Rotary position embedding, from a cache of cosines and sines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.errors import ExtractionError
from tools.extract_definitions.models import Model
from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes.fields import GROUPED, LATENT, ROTARY
from tools.extract_definitions.recipes.unread import of_heads, reported
from tools.extract_definitions.words import const, document, plural, tensor, uses, var

TENSOR_PARALLEL = (1, 2, 4, 8)
KERNELS = frozenset({"sgl-kernel:apply_rope_with_cos_sin_cache_inplace", "sgl-kernel:rotary_embedding"})
NEOX, INTERLEAVED = "rope_with_cos_sin_cache_neox_style", "rope_with_cos_sin_cache_gptj_style"
#: Sizes of heads for which SGLang calls the kernels that read a float32 cache (rotary_embedding.py: RotaryEmbedding).
HEAD_SIZES = (64, 128, 256, 512)


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    if not (stages := request.stages("rotary_emb", KERNELS)):
        return
    # Of latent attention, only the part with the position is rotated, and all heads share one key.
    family, dim = (INTERLEAVED, model.size("qk_rope_head_dim")) if model.is_latent else (NEOX, model.head_dim)
    if not model.is_latent and reported(request, ["rotary_emb"], of_heads(request)):
        return
    if dim not in HEAD_SIZES:
        reason = f"SGLang's kernel for heads of {dim} features reads a bfloat16 cache, which no family covers"
        request.uncovered["rotary_emb"] = reason
        return
    rotated = _rotated(model, dim)
    for size in request.tensor_parallel(TENSOR_PARALLEL):
        heads = model.size("num_attention_heads") // size
        kv_heads = 1 if model.is_latent else max(1, model.size("num_key_value_heads") // size)
        axes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_size": dim, "rotary_dim": rotated}
        yield Need(family, axes, Use(model, "rotary_emb", tp=size), stages)


def _rotated(model: Model, size: int) -> int:
    """How many features of each head are rotated.

    Raises:
        ExtractionError: this is no number of pairs within the head.
    """
    if (field := "partial_rotary_factor") not in model:
        return size
    rotated = int(size * model.number(field))
    if rotated % 2 or not 0 < rotated <= size:
        raise ExtractionError(
            f"{model.path}: {field} {model.number(field):g} rotates {rotated} of {size} features; correct it, so that "
            "it rotates an even number, at least 2"
        )
    return rotated


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    heads, kv_heads, rotated = axes["num_qo_heads"], axes["num_kv_heads"], axes["rotary_dim"]
    if family == NEOX:
        what = "of queries and keys"
        pairs = f"features i and i + {rotated // 2} of each head are rotated together (NeoX style)"
    else:
        what = "of the positional part of queries and keys in latent attention, where all heads share that of the key"
        pairs = "features 2 i and 2 i + 1 are rotated together (interleaved, GPT-J style)"
    how_many = (
        f"all {rotated} features" if rotated == axes["head_size"] else f"the first {rotated} features of each head"
    )
    description = (
        f"Rotary position embedding in bf16 {what}, from a float32 cache of cosines and sines: {pairs}. "
        f"{plural(heads, 'query head')} and {plural(kv_heads, 'key head')} per rank, {how_many} rotated. "
        f"{uses(needs)}"
    )
    dimensions = {
        "num_tokens": var("Number of tokens in the batch."),
        "max_seq_len": var("Number of positions that the cache covers."),
        "num_qo_heads": const(heads, "Query heads per rank."),
        "num_kv_heads": const(kv_heads, "Key heads per rank."),
        "head_size": const(axes["head_size"], "Features per head."),
        "rotary_dim": const(
            rotated, "Number of leading features of each head that are rotated; the others are copied."
        ),
    }
    query, key = ["num_tokens", "num_qo_heads", "head_size"], ["num_tokens", "num_kv_heads", "head_size"]
    cache = (
        "Row p holds the rotary_dim / 2 cosines of position p, then its sines; they are used as they are. "
        "sgl_kernel.rotary_embedding takes the cache in the dtype of q and rounds each product; it is run with values "
        "that bfloat16 holds exactly."
    )
    position = "Position of each token, 0 to max_seq_len - 1, in any order; tokens may share a position."
    inputs = {
        "q": tensor(query, "bfloat16", "Queries before rotation."),
        "k": tensor(key, "bfloat16", "Keys before rotation."),
        "cos_sin_cache": tensor(["max_seq_len", "rotary_dim"], "float32", cache),
        "positions": tensor(["num_tokens"], "int64", position),
    }
    outputs = {
        "q_out": tensor(query, "bfloat16", "Rotated queries. In-place kernels write them over q."),
        "k_out": tensor(key, "bfloat16", "Rotated keys. In-place kernels write them over k."),
    }
    return document(description, needs, (), dimensions, inputs, outputs)


RECIPE = Recipe("rope", (NEOX, INTERLEAVED), KERNELS, GROUPED | LATENT | ROTARY, needs, describe)
