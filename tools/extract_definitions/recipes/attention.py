"""Sizes, axes and texts that the attention families share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tools.extract_definitions.needs import Need, Request, Use
from tools.extract_definitions.recipes.unread import of_heads, reported, unread
from tools.extract_definitions.settings import CAPPED
from tools.extract_definitions.words import const, listed, tensor, var

#: Suffixes of the families that are more than plain attention, and kinds of layers in configurations.
VARIANTS = ("_softcap", "_softcap_window", "_window", "_sinks", "_sinks_window")
SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
TENSOR_PARALLEL = (1, 2, 4, 8)
#: Sizes of heads that FlashInfer's kernels for decode and prefill take: its loops load 64 features at a time, its
#: decode adds up over a power of two of threads, and what merges the parts of a request refuses other sizes.
HEAD_SIZES = (64, 128, 256)
REQUESTS = "Number of requests."
LENGTH = "Length of the offset arrays: number of requests + 1."
QUERY_OFFSETS = "Query offsets: request b owns rows qo_indptr[b] to qo_indptr[b + 1] - 1."
PAGE_OFFSETS = "Offsets of each request's pages in kv_indices; two equal neighbours mean a request without keys."
PAGE_INDICES = (
    "Page indices of all requests, one request after the other, each below num_pages. Requests may share pages."
)
LAST_PAGE = "Number of tokens in the last page of each request, 1 to page_size; 0 for a request without pages."
KEY_OFFSETS = (
    "Key and value offsets: request b owns rows kv_indptr[b] to kv_indptr[b + 1] - 1; "
    "two equal neighbours mean a request without keys."
)
LSE = "Base-2 logarithm of the sum of exponentials of the scaled logits; -inf for"


SPARSE = "its attention is sparse: queries read only the keys that the indexer chooses"


def has_dense_latents(request: Request, op: str) -> bool:
    """Whether a model's latent attention reads all keys. If it does not, the op is reported as not covered."""
    if request.model.is_sparse and request.model.is_latent:
        request.uncovered[op] = SPARSE
    return request.model.is_latent and not request.model.is_sparse


def is_covered(request: Request, op: str) -> bool:
    """Whether the families may cover grouped-query attention. If they may not, the op is reported as not covered."""
    size, cap = request.model.head_dim, _cap(request)
    other_size = "" if size in HEAD_SIZES else f"FlashInfer's kernels take no heads of {size} features"
    part = f"the families have whole numbers for caps (attn_logit_softcapping {cap:g})" if cap % 1 else ""
    return not reported(request, [op], *_unread(request, op), of_heads(request) or other_size, part)


def _unread(request: Request, op: str) -> Iterator[str]:
    """Caps and windows that the configuration gives and the code does not read."""
    config = request.model.config
    yield unread(request, "attn_logit_softcapping", [0])
    if config.get("use_sliding_window") is not False:
        yield unread(request, "sliding_window")
    kinds = set(LAYER_TYPES) if _has_window(request, op) else {"full_attention"}
    if set(config.get("layer_types") or kinds) != kinds:
        yield unread(request, "layer_types")


def _cap(request: Request) -> float:
    """The cap of the logits that the configuration gives; 0 if none."""
    field = "attn_logit_softcapping"
    return request.model.number(field) if request.model.config.get(field) else 0


def _has_window(request: Request, op: str) -> bool:
    """Whether some layers have a window: the configuration gives its size, and the code passes it."""
    built = request.usage.code.modules.get(op, ())
    return "sliding_window" in request.model and any("sliding_window_size=" in one for one in built)


def variants(request: Request, op: str) -> list[tuple[str, dict[str, int]]]:
    """Suffix and further const axes of the families that the layers of a model need; ("", {}) is plain attention.

    The code says whether logits are capped, and whether some layers have a window or sinks; the configuration says at
    which sizes. Layers with and without a window need families of their own.
    """
    model, code = request.model, request.usage.code
    built, called = code.modules.get(op, ()), code.calls.get(op, ())
    axes: dict[str, int] = {}
    suffix = ""
    if any(f"logit_cap={text}" in one for one in built for text in CAPPED) and _cap(request):
        suffix, axes = "_softcap", {"logits_soft_cap": int(_cap(request))}
    if any("sinks=" in one for one in called):
        suffix += "_sinks"
    if not _has_window(request, op):
        return [(suffix, axes)]
    types = set(model.config.get("layer_types") or LAYER_TYPES)
    windowed = (f"{suffix}_window", {**axes, "window_size": model.size("sliding_window")})
    return [*([(suffix, axes)] if "full_attention" in types else []), *([windowed] if SLIDING in types else [])]


def variant_axes(axes: Mapping[str, int]) -> dict[str, Any]:
    """The const axes that only variants have."""
    known = {
        "logits_soft_cap": "Cap c of the logits: c tanh(logit / c) takes their place.",
        "window_size": "Keys that a query reads, its own included; fewer where a request has fewer.",
    }
    return {name: const(axes[name], text) for name, text in known.items() if name in axes}


def variant_text(axes: Mapping[str, int], family: str) -> str:
    """What a variant has, for a description."""
    parts = []
    if cap := axes.get("logits_soft_cap"):
        parts.append(f"logits capped at {cap} by tanh")
    if "sinks" in family:
        parts.append("a sink for each query head: the logit of a key whose value is zero")
    if window := axes.get("window_size"):
        parts.append(f"a window of {window} keys")
    return f" With {listed(parts)}." if parts else ""


def sinks() -> dict[str, Any]:
    """The input of the sinks."""
    text = "Logit of the sink of each query head, without a scale. "
    text += "FlashInfer takes float32; SGLang's models keep bfloat16."
    return {"sinks": tensor(["num_qo_heads"], "float32", text)}


def paged_needs(
    request: Request,
    family: str,
    op: str,
    stage: str,
    heads: Callable[[int], dict[str, int]],
    sizes: tuple[int, ...],
    variants: Sequence[tuple[str, Mapping[str, int]]] = (("", {}),),
) -> Iterator[Need]:
    """One need for each tensor-parallel size, page size and variant.

    Args:
        request: the model and the options.
        family: the family for pages of several tokens; `<family>_ps1` is the one for pages of one token. Those of
            variants are for all page sizes.
        op: the op of the model.
        stage: the stage that the family serves.
        heads: gives the const axes of the heads per rank for a tensor-parallel size.
        sizes: the default tensor-parallel sizes.
        variants: suffixes of the family's name, with the const axes that these add.
    """
    for size in request.tensor_parallel(sizes):
        for page_size, (suffix, more) in itertools.product(request.options.page_sizes, variants):
            axes = {**heads(size), "page_size": page_size, **more}
            own = suffix or ("_ps1" if page_size == 1 else "")
            yield Need(f"{family}{own}", axes, Use(request.model, op, tp=size), (stage,))


def paged_text(decode: bool) -> tuple[str, str]:
    """Two parts of a description: what the queries are, and a sentence on how they are aligned with the keys."""
    if decode:
        return "for one new token per request (decode)", ""
    return (
        "for several new tokens per request (prefill with a cached prefix), causal",
        "Queries are aligned with the end of the keys. ",
    )


def paged_axes(decode: bool, sizes: dict[str, Any], page_size: int, last_page: bool) -> dict[str, Any]:
    """Axes of attention over a paged cache.

    Args:
        decode: whether each request has one query.
        sizes: the const axes of the heads.
        page_size: tokens per page.
        last_page: whether the length of last pages is an input.
    """
    axes: dict[str, Any] = {}
    if decode:
        axes["batch_size"] = var("Number of requests; each has one query.")
    else:
        axes["total_q"] = var("Total number of queries (new tokens) of all requests.")
        if last_page:
            axes["batch_size"] = var(REQUESTS)
    return {
        **axes,
        **sizes,
        "page_size": const(page_size, "Tokens per page."),
        "num_pages": var("Number of pages in the cache, used or not."),
        "len_indptr": var(LENGTH),
        "num_kv_indices": var("Total number of page indices of all requests."),
    }


def paged_constraints(decode: bool, last_page: bool) -> list[str]:
    """Constraints that the offsets of a paged cache impose."""
    constraints = ["len_indptr == batch_size + 1"] if decode or last_page else []
    if not decode:
        constraints.append("total_q == qo_indptr[-1].item()")
    return [*constraints, "num_kv_indices == kv_indptr[-1].item()"]


def paged_indices(decode: bool, last_page: bool) -> dict[str, Any]:
    """The offset and index inputs of a paged cache."""
    inputs = {} if decode else {"qo_indptr": tensor(["len_indptr"], "int32", QUERY_OFFSETS)}
    inputs["kv_indptr"] = tensor(["len_indptr"], "int32", PAGE_OFFSETS)
    inputs["kv_indices"] = tensor(["num_kv_indices"], "int32", PAGE_INDICES)
    if last_page:
        inputs["kv_last_page_len"] = tensor(["batch_size"], "int32", LAST_PAGE)
    return inputs


def ragged_axes(sizes: dict[str, Any]) -> dict[str, Any]:
    """Axes of attention on ragged tensors."""
    return {
        "total_q": var("Total number of queries (new tokens) of all requests."),
        "total_kv": var("Total number of keys of all requests."),
        **sizes,
        "len_indptr": var(LENGTH),
    }


def ragged_offsets() -> dict[str, Any]:
    """The offset inputs of ragged tensors."""
    return {
        "qo_indptr": tensor(["len_indptr"], "int32", QUERY_OFFSETS),
        "kv_indptr": tensor(["len_indptr"], "int32", KEY_OFFSETS),
    }


RAGGED_CONSTRAINTS = ("total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()")


def outputs(rows: str, dim: str, what: str, decode: bool, variant: str = "") -> dict[str, Any]:
    """The output and the log-sum-exp; `what` describes the output."""
    if "sinks" in variant:
        sums = "Base-2 logarithm of the sum of exponentials of the scaled logits and of the sink."
        return {
            "output": tensor([rows, "num_qo_heads", dim], "bfloat16", f"{what}, in which the sink counts as a zero."),
            "lse": tensor([rows, "num_qo_heads"], "float32", sums),
        }
    nothing = "a request without keys" if decode else "a query that may attend to no key"
    return {
        "output": tensor([rows, "num_qo_heads", dim], "bfloat16", f"{what}; 0 for {nothing}."),
        "lse": tensor([rows, "num_qo_heads"], "float32", f"{LSE} {nothing}."),
    }
