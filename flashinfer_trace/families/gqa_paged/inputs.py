"""Inputs and oracle of grouped-query attention over a paged cache; `attention.paged_cases` draws its plans."""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention.cases import add_peaks, give_signs, query_scale, softmax_scale, value_scale
from flashinfer_trace.families.attention.oracle import any_chunks, expected_outputs
from flashinfer_trace.families.attention.paged import spoil_request, spoil_unused
from flashinfer_trace.families.attention.paged_cases import index_inputs, page_table, paged_memory, query_lengths
from flashinfer_trace.families.attention.tiles import Memory
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Plan
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.layouts import LAYOUT, NAN_ROW
from flashinfer_trace.verdict.compare import Expected


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    """Normal queries and caches of the planned kind; entries that belong to no request are NaN or stale."""
    device, axes = draws.device, definition.const_axes
    heads, kv_heads, dim = (axes[axis] for axis in ("num_qo_heads", "num_kv_heads", "head_dim"))
    q_lens, kind, sm_scale = query_lengths(plan), plan["logits"], softmax_scale(dim, plan["scale"])
    table = page_table(definition, plan, draws)
    shape = (table.num_pages, table.page_size, kv_heads, dim)
    k_cache, v_cache = (draws.normal(shape, torch.bfloat16, value_scale(kind)) for _ in range(2))
    if kind == "positive":
        v_cache.abs_()
    q = draws.normal([sum(q_lens), heads, dim], scale=query_scale(kind))
    give_signs(kind, q, k_cache)
    add_peaks(kind, q, k_cache.flatten(0, 1), q_lens, plan["kv_lens"], sm_scale, draws, table.slots)
    used = table.used(device)
    for cache in (k_cache, v_cache):
        spoil_unused(cache, used, plan["unused"])
    if plan.get(LAYOUT) == NAN_ROW:
        spoil_request(table, q_lens, q, (k_cache, v_cache))
    inputs = {"q": q.to(torch.bfloat16), "k_cache": k_cache, "v_cache": v_cache, "sm_scale": sm_scale}
    inputs |= index_inputs(table, plan, device)
    return {name: inputs[name] for name in definition.inputs}


def oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Expected output and lse."""
    page_size = definition.const_axes["page_size"]
    causal = "qo_indptr" in inputs
    return expected_outputs(inputs["q"], memory(inputs, page_size), inputs["sm_scale"], causal, any_chunks(page_size))


def memory(inputs: Inputs, page_size: int) -> Memory:
    """Where the keys and values of the requests are."""
    return paged_memory(inputs, inputs["k_cache"].flatten(0, 1), inputs["v_cache"].flatten(0, 1), page_size)
