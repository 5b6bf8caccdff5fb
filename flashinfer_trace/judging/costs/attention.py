"""Costs of attention: keys and values that a query sees are read once, and only pairs under the mask are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_trace.judging.costs.elementwise import rows_named
from flashinfer_trace.judging.costs.work import CUDA_CORES, CostFunction, Elements, Sizes, Work

#: Of each pair of a query head and a key, besides the products: scale, maximum, exponential and sum.
SOFTMAX = 4
#: Of each pair whose logit is capped: quotient, tanh and product.
SOFT_CAP = 3


@dataclass(frozen=True)
class Request:
    """The queries and keys of one request: query i of q sees the keys up to number keys - q + i, the last `window` of
    them."""

    queries: int
    keys: int
    window: int | None = None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees: one query sees all keys, the one before it one key less, ..."""
        seeing = min(self.queries, self.keys)
        fewest, window = self.keys - seeing + 1, self.window or self.keys
        capped = max(0, self.keys - max(window, fewest - 1))
        most = self.keys - capped
        return capped * window + (fewest + most) * (most - fewest + 1) // 2

    @property
    def seen(self) -> range:
        """The keys that some query sees."""
        if not self.queries:
            return range(0)
        first = 0 if self.window is None else max(0, self.keys - self.queries - self.window + 1)
        return range(first, self.keys)


def operations(sizes: Sizes, pairs: int, score: int, value: int) -> dict[str, int]:
    """Of so many pairs: products with keys of `score` features and with values of `value` features, and the softmax."""
    heads = sizes["num_qo_heads"] * pairs
    each = SOFTMAX + (SOFT_CAP if "logits_soft_cap" in sizes else 0)
    return {"bfloat16": 2 * heads * (score + value), CUDA_CORES: each * heads}


def lengths(indptr: torch.Tensor) -> list[int]:
    return [int(length) for length in indptr.diff().tolist()]


def paged(sizes: Sizes, inputs: Mapping[str, Any]) -> tuple[list[Request], torch.Tensor, Elements]:
    """The requests, the slots [num_pages, page_size] that they read, and the entries of `kv_indices`."""
    page_size, indices = sizes["page_size"], inputs["kv_indices"].long().cpu()
    starts, counts = inputs["kv_indptr"].tolist(), lengths(inputs["kv_indptr"])
    queries = lengths(inputs["qo_indptr"]) if "qo_indptr" in inputs else [1] * len(counts)
    last = inputs["kv_last_page_len"].tolist() if "kv_last_page_len" in inputs else [page_size] * len(counts)
    slots = torch.zeros(sizes["num_pages"], page_size, dtype=torch.bool)
    entries = torch.zeros(len(indices), dtype=torch.bool)
    requests = []
    for start, pages, asked, tail in zip(starts[:-1], counts, queries, last, strict=True):
        keys = (pages - 1) * page_size + int(tail) if pages else 0
        requests.append(Request(asked, keys, sizes.get("window_size")))
        position = torch.arange(requests[-1].seen.start, requests[-1].seen.stop)
        entry = start + position // page_size
        slots[indices[entry], position % page_size] = True
        entries[entry] = True
    return requests, slots, entries


def paged_attention(caches: tuple[str, ...], score: tuple[str, ...], value: str) -> CostFunction:
    """Attention over pages: of one query for each request, or of its last tokens, which see none after them. `score`
    and `value` are axes of the features of keys (their sum) and of values."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        requests, slots, entries = paged(sizes, inputs)
        pairs = sum(request.pairs for request in requests)
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


def sparse(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Attention of each token to the slots that it chose; an index below 0 chooses nothing. With sinks, only the first
    entries of a row count, and keys are the values."""
    chosen = inputs["sparse_indices"].long().cpu()
    listed = torch.ones_like(chosen, dtype=torch.bool)
    if "topk_length" in inputs:
        listed = torch.arange(sizes["topk"]) < inputs["topk_length"].cpu()[:, None]
    real = listed & (chosen >= 0)
    if "kv" in inputs:
        count = operations(sizes, int(real.sum()), sizes["head_dim"], sizes["head_dim"])
        return Work(count, {"kv": rows_named(chosen[real], sizes["num_slots"]), "sparse_indices": listed})
    slots = rows_named(chosen[real], sizes["num_pages"] * sizes["page_size"]).view(-1, sizes["page_size"])
    count = operations(sizes, int(real.sum()), sizes["head_dim_ckv"] + sizes["head_dim_kpe"], sizes["head_dim_ckv"])
    return Work(count, {name: slots for name in ("ckv_cache", "kpe_cache", "kv_cache") if name in inputs})


def indexer(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """A product for each head of each pair of a token and a key that it sees; its maximum with 0, weighed and added."""
    start, end = (inputs[name].long().cpu() for name in ("k_start", "k_end"))
    key = torch.arange(sizes["num_keys"])
    seen = ((key >= start[:, None]) & (key < end[:, None])).any(dim=0)
    pairs, seeing = int((end - start).clamp_min(0).sum()), end > start
    each = sizes["num_heads"] * pairs
    count = {"float8_e4m3fn": 2 * each * sizes["head_dim"], CUDA_CORES: 3 * each + pairs}
    return Work(count, {"q": seeing, "weights": seeing, "k": seen, "k_scale": seen})


def ragged(score: str, value: str) -> CostFunction:
    """Causal attention over keys that lie one request after the other."""

    def work(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
        starts, asked, keys = inputs["kv_indptr"].tolist(), lengths(inputs["qo_indptr"]), lengths(inputs["kv_indptr"])
        rows, pairs = torch.zeros(sizes["total_kv"], dtype=torch.bool), 0
        for start, queries, length in zip(starts[:-1], asked, keys, strict=True):
            request = Request(queries, length, sizes.get("window_size"))
            rows[start + request.seen.start : start + request.seen.stop] = True
            pairs += request.pairs
        return Work(operations(sizes, pairs, sizes[score], sizes[value]), {"k": rows, "v": rows})

    return work


def extend(sizes: Sizes, inputs: Mapping[str, Any]) -> Work:
    """Attention of new tokens to themselves and to cached ones in the slots before them, as far as a window reaches."""
    starts, asked, cached = inputs["kv_indptr"].tolist(), lengths(inputs["qo_indptr"]), lengths(inputs["kv_indptr"])
    indices = inputs["kv_indices"].long().cpu()
    slots, entries = (torch.zeros(count, dtype=torch.bool) for count in (sizes["num_slots"], len(indices)))
    pairs = 0
    for start, queries, length in zip(starts[:-1], asked, cached, strict=True):
        request = Request(queries, length + queries, sizes.get("window_size"))
        pairs += request.pairs
        if queries:
            first = start + min(request.seen.start, length)
            entries[first : start + length] = True
            slots[indices[first : start + length]] = True
    count = operations(sizes, pairs, sizes["qk_dim"], sizes["vo_dim"])
    return Work(count, {"k_buffer": slots, "v_buffer": slots, "kv_indices": entries})


_LATENT = ("head_dim_ckv", "head_dim_kpe")
_KINDS = ("decode", "prefill_causal")
#: Variants of grouped-query attention: of the logits, and of the keys that a query sees.
_VARIANTS = [f"{logits}{keys}" for logits in ("", "_softcap", "_sinks") for keys in ("", "_window")]

COSTS: dict[str, CostFunction] = {
    **{
        f"gqa_paged_{kind}{variant}": paged_attention(("k_cache", "v_cache"), ("head_dim",), "head_dim")
        for kind in _KINDS
        for variant in ("_ps1", *_VARIANTS)
    },
    "gqa_paged_decode_fp8_cache": paged_attention(("k_cache", "v_cache"), ("head_dim",), "head_dim"),
    **{
        f"mla_paged_{kind}{suffix}": paged_attention(("ckv_cache", "kpe_cache"), _LATENT, "head_dim_ckv")
        for kind in _KINDS
        for suffix in ("", "_ps1")
    },
    "mla_paged_decode_page_table": page_table,
    "fp8_mqa_logits": indexer,
    **{f"dsa_sparse_attention{kind}": sparse for kind in ("", "_fp8_cache", "_sinks")},
    **{
        f"gqa_ragged_prefill_causal{variant}": ragged("head_dim", "head_dim")
        for variant in _VARIANTS
        if "sinks" not in variant
    },
    **{f"gqa_extend_causal{variant}": extend for variant in _VARIANTS},
    "mla_ragged_prefill_causal": ragged("qk_dim", "vo_dim"),
}
