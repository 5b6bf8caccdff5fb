"""Grouped-query attention over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request
from tools.extract_definitions.recipes import attention
from tools.extract_definitions.recipes.fields import GROUPED, VARIANT
from tools.extract_definitions.words import const, document, plural, tensor, users

DECODE, PREFILL = "gqa_paged_decode", "gqa_paged_prefill_causal"
FLASH_ATTENTION = "sgl-kernel:flash_attn_with_kvcache"
KERNELS = {
    DECODE: ("flashinfer:BatchDecodeWithPagedKVCacheWrapper", FLASH_ATTENTION),
    PREFILL: ("flashinfer:BatchPrefillWithPagedKVCacheWrapper", FLASH_ATTENTION),
}
STAGE = {DECODE: "decode", PREFILL: "prefill"}
KV_HEADS = (
    "Key-value heads per rank; each serves num_qo_heads / num_kv_heads consecutive query heads. If TP exceeds their "
    "number, ranks hold copies."
)


def heads(request: Request, size: int) -> dict[str, int]:
    """Numbers of heads per rank, and their size."""
    model = request.model
    return {
        "num_qo_heads": model.size("num_attention_heads") // size,
        "num_kv_heads": max(1, model.size("num_key_value_heads") // size),
        "head_dim": model.head_dim,
    }


def head_axes(axes: Mapping[str, int]) -> dict[str, Any]:
    """The const axes of `heads`."""
    return {
        "num_qo_heads": const(axes["num_qo_heads"], "Query heads per rank."),
        "num_kv_heads": const(axes["num_kv_heads"], KV_HEADS),
        "head_dim": const(axes["head_dim"], "Features per query, key and value head."),
    }


def heads_text(axes: Mapping[str, int]) -> str:
    """The heads in words."""
    query, kv = plural(axes["num_qo_heads"], "query head"), plural(axes["num_kv_heads"], "key-value head")
    return f"{query} and {kv} of size {axes['head_dim']}"


def scale(axes: Mapping[str, int]) -> dict[str, Any]:
    """The factor of the logits."""
    return tensor(None, "float32", f"Scale of the logits: 1/sqrt({axes['head_dim']}) in these models.")


def needs(request: Request) -> Iterator[Need]:
    if request.model.is_latent:
        return
    request.expect("attn", "grouped-query attention")
    if not request.usage.op("attn") or not attention.is_covered(request, "attn"):
        return
    for family, kernels in KERNELS.items():
        stages = request.stages("attn", kernels)
        if STAGE[family] not in stages:
            continue
        yield from attention.paged_needs(
            request,
            family,
            "attn",
            STAGE[family],
            partial(heads, request),
            attention.TENSOR_PARALLEL,
            attention.variants(request, "attn"),
        )


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    page_size, decode = axes["page_size"], family.startswith(DECODE)
    variant = family.removeprefix(DECODE if decode else PREFILL)
    plain = variant in ("", "_ps1")
    last_page = page_size > 1 or not plain
    rows = "batch_size" if decode else "total_q"
    what, aligned = attention.paged_text(decode)
    description = (
        f"Grouped-query attention over a paged cache, {what}. {heads_text(axes)}, page size {page_size}."
        f"{attention.variant_text(axes, family)} {aligned}{users(needs)}"
    )
    tail = "" if page_size == 1 else " Slots after the last token of a request may hold anything, including NaN."
    cache = ["num_pages", "page_size", "num_kv_heads", "head_dim"]
    order = "one per request" if decode else "one request after the other"
    inputs = {
        "q": tensor([rows, "num_qo_heads", "head_dim"], "bfloat16", f"Queries, {order}, after the rotary embedding."),
        "k_cache": tensor(cache, "bfloat16", f"Keys by page, after the rotary embedding.{tail}"),
        "v_cache": tensor(cache, "bfloat16", f"Values by page.{tail}"),
        **attention.paged_indices(decode, last_page),
        **(attention.sinks() if "sinks" in variant else {}),
        "sm_scale": scale(axes),
    }
    return document(
        description,
        needs,
        ("paged",) if decode else ("causal", "paged"),
        attention.paged_axes(decode, head_axes(axes), page_size, last_page) | attention.variant_axes(axes),
        inputs,
        attention.outputs(rows, "head_dim", "Weighted mean of the values for each query head", decode, variant),
        attention.paged_constraints(decode, last_page),
    )


RECIPE = Recipe(
    op_type="gqa_paged",
    families=tuple(f"{stage}{suffix}" for stage in KERNELS for suffix in ("", "_ps1", *attention.VARIANTS)),
    kernels=frozenset(kernel for kernels in KERNELS.values() for kernel in kernels),
    fields=GROUPED | VARIANT,
    needs=needs,
    document=describe,
)
