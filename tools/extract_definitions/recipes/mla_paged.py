"""Multi-head latent attention with absorbed projections over a paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Recipe, Request
from tools.extract_definitions.recipes import attention
from tools.extract_definitions.recipes.fields import LATENT
from tools.extract_definitions.words import const, document, plural, tensor, users

TENSOR_PARALLEL = (1, 8)
DECODE, PREFILL = "mla_paged_decode", "mla_paged_prefill_causal"
STAGE = {DECODE: "decode", PREFILL: "prefill"}
OP = "attn_mqa"
KERNELS = frozenset({"flashinfer:BatchMLAPagedAttentionWrapper"})


def needs(request: Request) -> Iterator[Need]:
    model = request.model
    if not attention.has_dense_latents(request, OP):
        return
    request.expect(OP, "latent attention")
    if request.usage.op("indexer"):
        request.unused["indexer"] = "index_topk is not set"

    def heads(size: int) -> dict[str, int]:
        return {
            "num_qo_heads": model.size("num_attention_heads") // size,
            "head_dim_ckv": model.size("kv_lora_rank"),
            "head_dim_kpe": model.size("qk_rope_head_dim"),
        }

    stages = request.stages(OP, KERNELS)
    for family in (DECODE, PREFILL):
        if STAGE[family] in stages:
            yield from attention.paged_needs(request, family, OP, STAGE[family], heads, TENSOR_PARALLEL)


def describe(family: str, axes: Mapping[str, int], needs: Sequence[Need]) -> dict[str, Any]:
    decode, page_size = family.startswith(DECODE), axes["page_size"]
    rows = "batch_size" if decode else "total_q"
    what, aligned = attention.paged_text(decode)
    description = (
        f"DeepSeek multi-head latent attention with absorbed projections over a paged cache, {what}. "
        f"{plural(axes['num_qo_heads'], 'query head')}, page size {page_size}. {aligned}{users(needs)}"
    )
    sizes = {
        "num_qo_heads": const(axes["num_qo_heads"], "Query heads per rank."),
        "head_dim_ckv": const(
            axes["head_dim_ckv"], "Features of the compressed key-value latent (kv_lora_rank), and of each output head."
        ),
        "head_dim_kpe": const(axes["head_dim_kpe"], "Features of the rotary part of queries and keys."),
    }
    latents = "Compressed key-value latents: the part of the keys without position, and the values."
    tail = "" if page_size == 1 else " Slots after the last token of a request may hold anything, including NaN."
    query, cache = [rows, "num_qo_heads"], ["num_pages", "page_size"]
    model = needs[0].use.model
    nope = model.size("qk_nope_head_dim")
    scale = (
        f"Scale of the logits: 1/sqrt({nope + axes['head_dim_kpe']}), from the head dimension before absorption "
        f"({nope} + {axes['head_dim_kpe']}), times the square of YaRN's magnitude correction in models that extend "
        "their context with it."
    )
    absorbed = "Queries without position, multiplied by the key up-projection (absorbed)."
    inputs = {
        "q_nope": tensor([*query, "head_dim_ckv"], "bfloat16", absorbed),
        "q_pe": tensor([*query, "head_dim_kpe"], "bfloat16", "Rotary part of the queries."),
        "ckv_cache": tensor([*cache, "head_dim_ckv"], "bfloat16", latents + tail),
        "kpe_cache": tensor([*cache, "head_dim_kpe"], "bfloat16", "Rotary part of the keys, shared by all heads."),
        **attention.paged_indices(decode, page_size > 1),
        "sm_scale": tensor(None, "float32", scale),
    }
    text = "Attention output in the latent space, before the value up-projection"
    return document(
        description,
        needs,
        ("paged",) if decode else ("causal", "paged"),
        attention.paged_axes(decode, sizes, page_size, page_size > 1),
        inputs,
        attention.outputs(rows, "head_dim_ckv", text, decode),
        attention.paged_constraints(decode, page_size > 1),
    )


RECIPE = Recipe("mla_paged", (DECODE, f"{DECODE}_ps1", PREFILL, f"{PREFILL}_ps1"), KERNELS, LATENT, needs, describe)
