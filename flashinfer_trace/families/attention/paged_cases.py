"""Shared by attention over paged caches, whatever they contain: plans, page tables, and reading from a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flashinfer_trace.families.attention.cases import SCALES, Requests, cached_lengths, corner_lengths, has_queries
from flashinfer_trace.families.attention.paged import (
    ALSO_LENGTHS,
    IN_A_ROW,
    PageTable,
    allocate_pages,
    distinct_pages,
)
from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.families.attention.tiles import Memory
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan, PlanRequest
from flashinfer_trace.harness.faults import Fault
from flashinfer_trace.harness.inputs import Draws, indptr
from flashinfer_trace.verdict.compare import Expected

#: The queries of grouped-query and of latent attention.
QUERIES = ("q", "q_nope", "q_pe")


def corners(request: PlanRequest) -> list[Plan]:
    """The plans of `corner_lengths`; before them, one of pages that are shared.

    It has three requests with the same first two pages, others of their own, and up to 70 queries; one page is not
    used. Of a page of usual size, requests that are drawn on a CPU fill one at most.
    """
    page_size = request.definition.const_axes["page_size"]
    found = corner_lengths(request)
    if not request.large:
        found = [{**plan, "unused": ALSO_LENGTHS} for plan in found]
    if page_size == 1:
        return found
    kv_lens = [3 * page_size + 5, 2 * page_size + 1, 4 * page_size]
    plan: Plan = {"kv_lens": kv_lens, "logits": "normal", "scale": SCALES[1], "shared_prefix": 2}
    plan["num_pages"] = distinct_pages(kv_lens, page_size, 2) + 1
    if has_queries(request.definition):
        # As many as there are keys at most: not every kernel takes queries that see none.
        plan["q_lens"] = [min(pair) for pair in zip((33, 1, 70), kv_lens, strict=True)]
    return [plan, *found]


def query_lengths(plan: Plan) -> list[int]:
    """Queries of each request."""
    lengths: list[int] = plan.get("q_lens", [1] * len(plan["kv_lens"]))
    return lengths


def page_table(definition: Definition, plan: Plan, draws: Draws) -> PageTable:
    """The planned pages, or the slots of the tokens that are cached.

    Raises:
        InputError: the plan has tokens, but no pages to hold them.
    """
    slots = plan.get("num_slots")
    lengths, pages = (plan["kv_lens"], plan["num_pages"]) if slots is None else (cached_lengths(plan), slots)
    shared, in_a_row = plan["shared_prefix"], plan["logits"] in IN_A_ROW
    try:
        return allocate_pages(lengths, definition.const_axes.get("page_size", 1), pages, shared, draws, in_a_row)
    except ValueError as error:
        raise InputError(f"{definition.name}: {error}") from error


def index_inputs(table: PageTable, plan: Plan, device: torch.device) -> Inputs:
    """The inputs that locate the queries and keys of each request."""
    host = {
        "qo_indptr": indptr(query_lengths(plan), "cpu"),
        "kv_indptr": table.indptr("cpu"),
        "kv_indices": table.indices("cpu"),
        "kv_last_page_len": table.last_page_len("cpu"),
    }
    if plan["unused"] == ALSO_LENGTHS:
        host["kv_last_page_len"].masked_fill_(host["kv_indptr"].diff() == 0, table.page_size)
    # Each in memory of its own, as a kernel expects it.
    return {name: part.clone() for name, part in together(host, device).items()}


def together(tensors: Mapping[str, torch.Tensor], device: str | torch.device) -> dict[str, torch.Tensor]:
    """Vectors of one dtype on another device, in one transfer: each waits for all that a GPU has been given to do."""
    sent = torch.cat(list(tensors.values())).to(device)
    parts = torch.split(sent, [len(tensor) for tensor in tensors.values()])
    return dict(zip(tensors, parts, strict=True))


def kv_lengths(inputs: Inputs, page_size: int) -> torch.Tensor:
    """Tokens of each request: int32 [batch_size]; 0 for a request without pages, whatever its last page length is."""
    pages = inputs["kv_indptr"].diff()
    lengths = torch.where(pages > 0, (pages - 1) * page_size + inputs.get("kv_last_page_len", 1), 0)
    return lengths.to(torch.int32)


def paged_memory(inputs: Inputs, keys: torch.Tensor, values: torch.Tensor, page_size: int) -> Memory:
    """Where the keys and values of the requests are; tokens are read one by one through flat slot numbers.

    Args:
        keys, values: those of all slots, [num_pages * page_size, num_kv_heads, dim].
    """
    first_pages, indices = inputs["kv_indptr"], inputs["kv_indices"]
    names = ("kv_indptr", "kv_last_page_len", "qo_indptr")
    host = together({name: inputs[name] for name in names if name in inputs}, "cpu")
    lengths = kv_lengths(host, page_size).tolist()
    queries = host["qo_indptr"].tolist() if "qo_indptr" in host else list(range(len(first_pages)))

    def slots(request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        pages: torch.Tensor = indices[first_pages[request] + position // page_size].long()
        return pages * page_size + position % page_size

    return Memory(keys, values, queries, lengths, slots)


def paged_family(
    name: str,
    op_type: str,
    twin: Mapping[str, int],
    make_inputs: Callable[[Definition, Plan, Draws], Inputs],
    oracle: Callable[[Definition, Inputs], dict[str, Expected]],
    kernels: tuple[Kernel, ...],
    faults: tuple[Fault, ...],
) -> Family:
    """The record of one family; `Family` documents the arguments."""
    return Family(
        name=name,
        op_type=op_type,
        twin=twin,
        plan=Requests("num_pages", corners),
        make_inputs=make_inputs,
        strided=(*QUERIES, "k_cache", "v_cache", "ckv_cache", "kpe_cache"),
        isolated=QUERIES,
        oracle=oracle,
        compare={"output": OUTPUT, "lse": LSE},
        kernels=kernels,
        faults=faults,
    )
