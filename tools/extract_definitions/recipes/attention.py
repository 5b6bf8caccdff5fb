"""Sizes, axes and texts that the attention families share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tools.extract_definitions.needs import Need, Request, Use
from tools.extract_definitions.words import const, tensor, var

TENSOR_PARALLEL = (1, 2, 4, 8)
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


def paged_needs(
    request: Request, family: str, op: str, stage: str, heads: Callable[[int], dict[str, int]], sizes: tuple[int, ...]
) -> Iterator[Need]:
    """One need for each tensor-parallel size and page size.

    Args:
        request: the model and the options.
        family: the family for pages of several tokens; `<family>_ps1` is the one for pages of one token.
        op: the op of the model.
        stage: the stage that the family serves.
        heads: gives the const axes of the heads per rank for a tensor-parallel size.
        sizes: the default tensor-parallel sizes.
    """
    for size in request.tensor_parallel(sizes):
        for page_size in request.options.page_sizes:
            axes = {**heads(size), "page_size": page_size}
            yield Need(f"{family}_ps1" if page_size == 1 else family, axes, Use(request.model, op, tp=size), (stage,))


def paged_text(decode: bool) -> tuple[str, str]:
    """Two parts of a description: what the queries are, and a sentence on how they are aligned with the keys."""
    if decode:
        return "for one new token per request (decode)", ""
    return (
        "for several new tokens per request (prefill with a cached prefix), causal",
        "Queries are aligned with the end of the keys. ",
    )


def paged_axes(decode: bool, sizes: dict[str, Any], page_size: int) -> dict[str, Any]:
    """Axes of attention over a paged cache; `sizes` are the const axes of the heads."""
    axes: dict[str, Any] = {}
    if decode:
        axes["batch_size"] = var("Number of requests; each has one query.")
    else:
        axes["total_q"] = var("Total number of queries (new tokens) of all requests.")
        if page_size > 1:
            axes["batch_size"] = var(REQUESTS)
    return {
        **axes,
        **sizes,
        "page_size": const(page_size, "Tokens per page."),
        "num_pages": var("Number of pages in the cache, used or not."),
        "len_indptr": var(LENGTH),
        "num_kv_indices": var("Total number of page indices of all requests."),
    }


def paged_constraints(decode: bool, page_size: int) -> list[str]:
    """Constraints that the offsets of a paged cache impose."""
    constraints = ["len_indptr == batch_size + 1"] if decode or page_size > 1 else []
    if not decode:
        constraints.append("total_q == qo_indptr[-1].item()")
    return [*constraints, "num_kv_indices == kv_indptr[-1].item()"]


def paged_indices(decode: bool, page_size: int) -> dict[str, Any]:
    """The offset and index inputs of a paged cache."""
    inputs = {} if decode else {"qo_indptr": tensor(["len_indptr"], "int32", QUERY_OFFSETS)}
    inputs["kv_indptr"] = tensor(["len_indptr"], "int32", PAGE_OFFSETS)
    inputs["kv_indices"] = tensor(["num_kv_indices"], "int32", PAGE_INDICES)
    if page_size > 1:
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


def outputs(rows: str, dim: str, what: str, decode: bool) -> dict[str, Any]:
    """The output and the log-sum-exp; `what` describes the output."""
    nothing = "a request without keys" if decode else "a query that may attend to no key"
    return {
        "output": tensor([rows, "num_qo_heads", dim], "bfloat16", f"{what}; 0 for {nothing}."),
        "lse": tensor([rows, "num_qo_heads"], "float32", f"{LSE} {nothing}."),
    }
