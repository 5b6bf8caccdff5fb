"""Grouped-query attention on ragged keys and values, for prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request, Use
from tools.extract_definitions.recipes import attention
from tools.extract_definitions.recipes.fields import GROUPED, VARIANT
from tools.extract_definitions.recipes.gqa_paged import head_axes, heads, heads_text, scale
from tools.extract_definitions.words import document, tensor, users

FAMILY = "gqa_ragged_prefill_causal"
#: What SGLang passes to kernels of ragged tensors: a cap, but neither a window, not even in layers that have one, nor
#: sinks (flashinfer_backend.py: what plans and calls prefill_wrapper_ragged).
VARIANTS = ("", "_softcap")
KERNELS = frozenset({"flashinfer:BatchPrefillWithRaggedKVCacheWrapper", "sgl-kernel:flash_attn_varlen_func"})


def needs(request: Request) -> Iterator[Need]:
    if request.model.is_latent or "prefill" not in request.stages("attn", KERNELS):
        return
    if not attention.is_covered(request, "attn"):
        return
    for size in request.tensor_parallel(attention.TENSOR_PARALLEL):
        for suffix, more in attention.variants(request, "attn"):
            if suffix in VARIANTS:
                use = Use(request.model, "attn", tp=size)
                yield Need(f"{FAMILY}{suffix}", {**heads(request, size), **more}, use, ("prefill",))


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    description = (
        "Grouped-query attention for several new tokens per request (prefill), with keys and values in ragged tensors, "
        f"causal. {heads_text(axes)}.{attention.variant_text(axes, family)} "
        f"Queries are aligned with the end of the keys. {users(needs)}"
    )
    rows = ["total_kv", "num_kv_heads", "head_dim"]
    text = "Queries, one request after the other, after the rotary embedding."
    inputs = {
        "q": tensor(["total_q", "num_qo_heads", "head_dim"], "bfloat16", text),
        "k": tensor(rows, "bfloat16", "Keys, one request after the other, after the rotary embedding."),
        "v": tensor(rows, "bfloat16", "Values, one request after the other."),
        **attention.ragged_offsets(),
        "sm_scale": scale(axes),
    }
    outputs = attention.outputs("total_q", "head_dim", "Weighted mean of the values for each query head", decode=False)
    dimensions = attention.ragged_axes(head_axes(axes)) | attention.variant_axes(axes)
    return document(description, needs, ("causal",), dimensions, inputs, outputs, attention.RAGGED_CONSTRAINTS)


FAMILIES = tuple(f"{FAMILY}{suffix}" for suffix in VARIANTS)
RECIPE = Recipe("gqa_ragged", FAMILIES, KERNELS, GROUPED | VARIANT, needs, describe)
