"""Plans, inputs and oracle of grouped-query attention over a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.families.attention.cases import (
    add_peaks,
    batch_size_of,
    lengths,
    lengths_for_axes,
    query_scale,
    softmax_scale,
)
from flashinfer_trace.families.attention.oracle import Request, expected_outputs
from flashinfer_trace.families.attention.paged import UNUSED_KINDS, allocate_pages, distinct_pages, spoil_unused
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.family import Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, split


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    """Lengths, pages and kinds of one case."""
    return _plans(request)


@st.composite
def _plans(draw: Callable[[Any], Any], request: PlanRequest) -> Plan:
    page_size = request.definition.const_axes["page_size"]
    plan: Plan = draw(lengths(request, page_size, "qo_indptr" in request.definition.inputs))
    plan["shared_prefix"] = draw(st.sampled_from([0, 0, 1, 3]))
    needed = distinct_pages(plan["kv_lens"], page_size, plan["shared_prefix"])
    least = int(request.limits.get("num_pages", (0, 0))[0])
    plan["num_pages"] = max(least, needed + draw(st.integers(0, 3)))
    plan["unused"] = draw(st.sampled_from(UNUSED_KINDS))
    return plan


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    """A plan with these axes; `lengths_for_axes` says what is chosen if it is not given."""
    page_size, kv_lens = definition.const_axes["page_size"], None
    if "num_kv_indices" in axes or axes.get("num_pages") == 0:
        batch_size = batch_size_of(axes)
        pages = split(axes.get("num_kv_indices", 0), batch_size, draws)
        # The last page of a request with pages holds 1 to page_size tokens.
        missing = draws.host_integers(batch_size, 0, page_size - 1)
        kv_lens = [count * page_size - m if count else 0 for count, m in zip(pages, missing, strict=True)]
    plan = lengths_for_axes(axes, kv_lens, "qo_indptr" in definition.inputs, draws)
    plan |= {"shared_prefix": 0, "unused": "nan"}
    plan["num_pages"] = axes.get("num_pages", distinct_pages(plan["kv_lens"], page_size))
    return plan


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> dict[str, Any]:
    """Normal queries and caches of the planned kind; tokens that no request has are NaN or stale."""
    device, axes = draws.device, definition.const_axes
    heads, kv_heads, dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim"))
    kv_lens, kind, sm_scale = plan["kv_lens"], plan["logits"], softmax_scale(dim)
    q_lens = plan.get("q_lens", [1] * len(kv_lens))
    try:
        table = allocate_pages(kv_lens, axes["page_size"], plan["num_pages"], plan["shared_prefix"], draws)
    except ValueError as error:
        raise InputError(f"{definition.name}: {error}") from error
    shape = (table.num_pages, table.page_size, kv_heads, dim)
    k_cache, v_cache = draws.normal(shape, torch.bfloat16), draws.normal(shape, torch.bfloat16)
    if kind == "positive":
        v_cache.abs_()
    q = draws.normal([sum(q_lens), heads, dim], scale=query_scale(kind))
    if kind == "peaked":
        tokens = k_cache.flatten(0, 1)
        add_peaks(q, lambda request: tokens[table.slots(request, device)], q_lens, kv_lens, sm_scale, draws)
    used = table.used(device)
    for cache in (k_cache, v_cache):
        spoil_unused(cache, used, plan["unused"])
    inputs: dict[str, Any] = {
        "q": q.to(torch.bfloat16),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "qo_indptr": indptr(q_lens, device),
        "kv_indptr": table.indptr(device),
        "kv_indices": table.indices(device),
        "kv_last_page_len": table.last_page_len(device),
        "sm_scale": sm_scale,
    }
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: dict[str, Any]) -> dict[str, Expected]:
    """Expected output and lse; tokens are read one by one through flat slot numbers, not page by page."""
    dim, page_size = definition.const_axes["head_dim"], definition.const_axes["page_size"]
    requests = own_requests(inputs, page_size)
    return expected_outputs(inputs["q"], requests, dim, inputs["sm_scale"], "qo_indptr" in inputs, page_size)


def own_requests(inputs: dict[str, Any], page_size: int) -> Iterator[Request]:
    """Queries, keys and values of each request."""
    q, indices = inputs["q"], inputs["kv_indices"]
    pages = inputs["kv_indptr"].tolist()
    queries = inputs["qo_indptr"].tolist() if "qo_indptr" in inputs else list(range(q.shape[0] + 1))
    last = inputs["kv_last_page_len"].tolist() if "kv_last_page_len" in inputs else [1] * (len(pages) - 1)
    keys, values = (inputs[name].flatten(0, 1) for name in ("k_cache", "v_cache"))
    for request in range(len(pages) - 1):
        first, end = pages[request], pages[request + 1]
        kv_len = (end - first - 1) * page_size + last[request] if end > first else 0
        position = torch.arange(kv_len, device=q.device)
        slots = indices[first + position // page_size].long() * page_size + position % page_size
        yield Request(queries[request], queries[request + 1], keys[slots], values[slots])
