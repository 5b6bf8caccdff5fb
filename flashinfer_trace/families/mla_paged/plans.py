"""Plans and inputs of mla_paged: lengths of queries and keys, page tables, and kinds of logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.families.attention.paged import UNUSED_KINDS, allocate_pages, distinct_pages, spoil_unused
from flashinfer_trace.harness.family import Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, indptr, sizes, split

#: normal: logits of standard deviation 1.7 at real sizes; large: 35, so that errors of logits matter; peaked: one key
#: has nearly all the weight; uniform: all keys have the same; positive: the values do not cancel.
LOGIT_KINDS = ("normal", "large", "peaked", "uniform", "positive")
QUERY_SCALE = {"uniform": 0.0, "large": 20.0}
#: How far above the others the one key of peaked logits is, in nats.
PEAK = 14.0
#: float32(1/sqrt(128 + 64)): the head dimension before absorption, at any size of the twin.
SM_SCALE = float(torch.tensor(192**-0.5, dtype=torch.float32))


def has_queries(definition: Definition) -> bool:
    """Whether requests have any number of queries (prefill), not one each (decode)."""
    return "qo_indptr" in definition.inputs


def plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    """Lengths, pages and kinds of one case."""
    return _plans(request)


@st.composite
def _plans(draw: Callable[[Any], Any], request: PlanRequest) -> Plan:
    definition = request.definition
    page_size = definition.const_axes["page_size"]
    low, high = request.range("len_indptr", 1, 6, 17)
    # An empty batch, and one without keys, prove nothing: they are drawn, but seldom.
    batch_size = 0 if low == 1 and draw(st.integers(0, 30)) == 7 else draw(st.integers(max(1, low - 1), high - 1))
    keyless = draw(st.integers(0, 30)) == 7
    longest = 2000 if request.large else 40
    plan: Plan = {}
    if has_queries(definition):
        left = request.range("total_q", 0, 12, 256)[1]
        q_lens, kv_lens = [], []
        for request_number in range(batch_size):
            q_lens.append(draw(sizes(int(request_number == 0), left)))
            left -= q_lens[-1]
            # Keys are cached tokens and then the queries' own; fewer keys than queries leave rows without any.
            if draw(st.integers(0, 3)):
                kv_lens.append(q_lens[-1] + draw(sizes(0, longest - q_lens[-1])))
            else:
                kv_lens.append(draw(st.integers(0, q_lens[-1])))
        plan["q_lens"] = q_lens
    else:
        kv_lens = [draw(sizes(0, longest)) for _ in range(batch_size)]
    if batch_size >= 3 and draw(st.integers(0, 3)) == 0:
        kv_lens[batch_size // 2] = 0
    if batch_size and not any(kv_lens) and not keyless:
        kv_lens[0] = longest // 2
    plan["kv_lens"] = kv_lens
    plan["shared_prefix"] = draw(st.sampled_from([0, 0, 1, 3]))
    least = request.limits.get("num_pages", (0, 0))[0]
    plan["num_pages"] = max(least, distinct_pages(kv_lens, page_size, plan["shared_prefix"]) + draw(st.integers(0, 3)))
    plan["logits"] = draw(st.sampled_from(LOGIT_KINDS))
    plan["unused"] = draw(st.sampled_from(UNUSED_KINDS))
    return plan


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    """A plan with these axes; what is not given is chosen: 4 requests, 8 queries, up to 64 tokens a request."""
    page_size = definition.const_axes["page_size"]
    batch_size = max(0, axes.get("batch_size", axes.get("len_indptr", 5) - 1))
    if "num_kv_indices" in axes or axes.get("num_pages") == 0:
        pages = split(axes.get("num_kv_indices", 0), batch_size, draws)
        # The last page of a request with pages holds 1 to page_size tokens.
        missing = draws.host_integers(batch_size, 0, page_size - 1)
        kv_lens = [count * page_size - m if count else 0 for count, m in zip(pages, missing, strict=True)]
    else:
        kv_lens = draws.host_integers(batch_size, 1, 64)
    plan: Plan = {"kv_lens": kv_lens, "shared_prefix": 0, "logits": "normal", "unused": "nan"}
    plan["num_pages"] = axes.get("num_pages", distinct_pages(kv_lens, page_size))
    if has_queries(definition):
        plan["q_lens"] = split(axes.get("total_q", 8), batch_size, draws)
    return plan


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> dict[str, Any]:
    """Normal queries and caches of the planned kind; entries that no request has are NaN or stale."""
    device, axes = draws.device, definition.const_axes
    heads, ckv_dim, kpe_dim = (axes[axis] for axis in ("num_qo_heads", "head_dim_ckv", "head_dim_kpe"))
    kv_lens, kind = plan["kv_lens"], plan["logits"]
    q_lens = plan.get("q_lens", [1] * len(kv_lens))
    try:
        table = allocate_pages(kv_lens, axes["page_size"], plan["num_pages"], plan["shared_prefix"], draws)
    except ValueError as error:
        raise InputError(f"{definition.name}: {error}") from error
    cache_shape = (table.num_pages, table.page_size, ckv_dim + kpe_dim)
    cache = draws.normal(cache_shape, torch.bfloat16)
    if kind == "positive":
        cache.abs_()
    queries = draws.normal([sum(q_lens), heads, ckv_dim + kpe_dim], scale=QUERY_SCALE.get(kind, 1.0))
    if kind == "peaked":
        _add_peaks(queries, cache, table.slots, q_lens, kv_lens, draws)
    used = table.used(device)
    spoil_unused(cache, used, plan["unused"])
    queries = queries.to(torch.bfloat16)
    inputs: dict[str, Any] = {
        "q_nope": queries[..., :ckv_dim].contiguous(),
        "q_pe": queries[..., ckv_dim:].contiguous(),
        "ckv_cache": cache[..., :ckv_dim].contiguous(),
        "kpe_cache": cache[..., ckv_dim:].contiguous(),
        "qo_indptr": indptr(q_lens, device),
        "kv_indptr": table.indptr(device),
        "kv_indices": table.indices(device),
        "kv_last_page_len": table.last_page_len(device),
        "sm_scale": SM_SCALE,
    }
    return {name: inputs[name] for name in definition.inputs}


def _add_peaks(
    queries: torch.Tensor,
    cache: torch.Tensor,
    slots: Callable[[int, torch.device], torch.Tensor],
    q_lens: list[int],
    kv_lens: list[int],
    draws: Draws,
) -> None:
    """Adds to all queries of a request a multiple of one of its keys, which raises that key's logit by PEAK."""
    entries = cache.flatten(0, 1)
    start = 0
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if kv_len:
            position = draws.host_integers(1, 0, kv_len - 1)[0]
            key = entries[slots(request, cache.device)[position]].float()
            queries[start : start + q_len] += key * (PEAK / SM_SCALE / max(float(key.square().sum()), math.ulp(1.0)))
        start += q_len
