"""Costs of attention: keys and values that a query sees are read once, and only pairs under the mask are computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.costs.work import CUDA_CORES, CostFunction, Elements, Sizes, Work

__all__ = ["COSTS"]

#: Of each pair of a query head and a key, besides the products: scale, maximum, exponential and sum.
SOFTMAX = 4


@dataclass(frozen=True)
class Request:
    """The queries and keys of one request.

    Attributes:
        queries: how many; the last ones of the request.
        keys: how many.
        number: its place in the batch.
    """

    number: int
    queries: int
    keys: int

    def pairs(self, causal: bool) -> int:
        """Pairs of a query and a key that it sees: query i of q sees the first keys - q + i + 1 of the keys."""
        if not causal:
            return self.queries * self.keys
        seeing = min(self.queries, self.keys)
        return seeing * self.keys - seeing * (seeing - 1) // 2


def operations(sizes: Sizes, pairs: int, score: int, value: int) -> dict[str, int]:
    """Of so many pairs: products with keys of `score` features and with values of `value` features, and the softmax."""
    heads = sizes["num_qo_heads"] * pairs
    return {"bfloat16": 2 * heads * (score + value), CUDA_CORES: SOFTMAX * heads}


def lengths(indptr: torch.Tensor) -> list[int]:
    return [int(length) for length in indptr.diff().tolist()]


def paged(sizes: Sizes, inputs: Mapping[str, Any]) -> tuple[list[Request], torch.Tensor, Elements]:
    """The requests, the slots [num_pages, page_size] that they read, and the entries of `kv_indices`."""
    page_size, indices = sizes["page_size"], inputs["kv_indices"].long()
    starts, counts = inputs["kv_indptr"].tolist(), lengths(inputs["kv_indptr"])
    queries = lengths(inputs["qo_indptr"]) if "qo_indptr" in inputs else [1] * len(counts)
    last = inputs["kv_last_page_len"].tolist() if "kv_last_page_len" in inputs else [page_size] * len(counts)
    slots = torch.zeros(sizes["num_pages"], page_size, dtype=torch.bool)
    entries = torch.zeros(len(indices), dtype=torch.bool)
    requests = []
    for number, (start, pages, asked, tail) in enumerate(zip(starts[:-1], counts, queries, last, strict=True)):
        keys = (pages - 1) * page_size + int(tail) if pages else 0
        requests.append(Request(number, asked, keys))
        if asked and pages:
            own = indices[start : start + pages].cpu()
            slots[own[:-1]] = True
            slots[own[-1], : int(tail)] = True
            entries[start : start + pages] = True
    return requests, slots, entries


def paged_attention(caches: tuple[str, ...], score: tuple[str, ...], value: str, causal: bool) -> CostFunction:
    """Attention over pages.

    Args:
        caches: inputs with the pages.
        score, value: axes of the features of keys (their sum) and of values.
        causal: whether the queries are the last tokens of a request, and see none after them.
    """

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        requests, slots, entries = paged(sizes, inputs)
        pairs = sum(request.pairs(causal) for request in requests)
        count = operations(sizes, pairs, sum(sizes[axis] for axis in score), sizes[value])
        return Work(count, {**dict.fromkeys(caches, slots), "kv_indices": entries})

    return work


def page_table(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Latent attention with a table of pages, one query for each request."""
    page_size, table = sizes["page_size"], inputs["page_table"].long().cpu()
    slots = torch.zeros(sizes["num_pages"], page_size, dtype=torch.bool)
    entries = torch.zeros(table.shape, dtype=torch.bool)
    keys = [int(length) for length in inputs["seq_lens"].tolist()]
    for request, length in enumerate(keys):
        whole, tail = divmod(length, page_size)
        slots[table[request, :whole]] = True
        if tail:
            slots[table[request, whole], :tail] = True
        entries[request, : whole + bool(tail)] = True
    count = operations(sizes, sum(keys), sizes["head_dim_key"], sizes["head_dim_ckv"])
    return Work(count, {"kv_cache": slots, "page_table": entries})


def seen_rows(requests: list[Request], starts: list[int]) -> Iterator[tuple[int, int]]:
    """First and last row of the keys of each request that has queries."""
    for request in requests:
        if request.queries:
            yield starts[request.number], starts[request.number] + request.keys


def ragged(score: str, value: str) -> CostFunction:
    """Causal attention over keys that lie one request after the other."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        asked, keys = lengths(inputs["qo_indptr"]), lengths(inputs["kv_indptr"])
        requests = [Request(number, *each) for number, each in enumerate(zip(asked, keys, strict=True))]
        rows = torch.zeros(sizes["total_kv"], dtype=torch.bool)
        for first, last in seen_rows(requests, inputs["kv_indptr"].tolist()):
            rows[first:last] = True
        pairs = sum(request.pairs(causal=True) for request in requests)
        return Work(operations(sizes, pairs, sizes[score], sizes[value]), {"k": rows, "v": rows})

    return work


_LATENT = ("head_dim_ckv", "head_dim_kpe")

COSTS: dict[str, CostFunction] = {
    **{
        f"gqa_paged_{kind}{suffix}": paged_attention(("k_cache", "v_cache"), ("head_dim",), "head_dim", causal)
        for kind, causal in (("decode", False), ("prefill_causal", True))
        for suffix in ("", "_ps1")
    },
    **{
        f"mla_paged_{kind}{suffix}": paged_attention(("ckv_cache", "kpe_cache"), _LATENT, "head_dim_ckv", causal)
        for kind, causal in (("decode", False), ("prefill_causal", True))
        for suffix in ("", "_ps1")
    },
    "mla_paged_decode_page_table": page_table,
    "gqa_ragged_prefill_causal": ragged("head_dim", "head_dim"),
    "mla_ragged_prefill_causal": ragged("qk_dim", "vo_dim"),
}
