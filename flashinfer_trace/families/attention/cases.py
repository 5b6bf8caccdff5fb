"""Cases of attention: lengths, kinds of logits, and the pages of a cache, with entries that no kernel may read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.attention.oracle import Memory
from flashinfer_trace.families.attention.policies import LSE, OUTPUT
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan, PlanRequest
from flashinfer_trace.harness.faults import Fault, FaultyCase, with_inputs
from flashinfer_trace.harness.inputs import Draws, indptr, sizes, split
from flashinfer_trace.harness.plans import PlanShape
from flashinfer_trace.verdict.compare import Expected

#: Contents of entries that belong to no request: NaN, or large values such as an earlier request may have left.
STALE = "stale"
UNUSED_KINDS = ("nan", STALE)
#: NaN, and the last page of a request without pages has a length. It is for references: wrappers of kernels add it to
#: the number of tokens even where there are no pages.
ALSO_LENGTHS = "nan_and_lengths"
#: Kinds of logits, of corners on a CPU only, with pages that follow each other.
IN_A_ROW = ("spread",)


@dataclass(frozen=True)
class PageTable:
    """Pages of each request, as serving engines pass them.

    Attributes:
        lengths: tokens of each request.
        page_size: tokens per page.
        num_pages: pages in the cache.
        pages: page indices of each request, in order; all pages but the last are full.
    """

    lengths: tuple[int, ...]
    page_size: int
    num_pages: int
    pages: tuple[tuple[int, ...], ...]

    def indptr(self, device: str | torch.device) -> torch.Tensor:
        """Offsets of the requests in `indices`: int32 [batch_size + 1]."""
        return indptr([len(pages) for pages in self.pages], device)

    def indices(self, device: str | torch.device) -> torch.Tensor:
        """Page indices of all requests: int32 [sum of their numbers of pages]."""
        return self._flat.to(device, torch.int32)

    def last_page_len(self, device: str | torch.device) -> torch.Tensor:
        """Tokens in the last page of each request, 0 for a request without pages: int32 [batch_size]."""
        last = [(length - 1) % self.page_size + 1 if length else 0 for length in self.lengths]
        return torch.tensor(last, dtype=torch.int32, device=device)

    def used(self, device: str | torch.device) -> torch.Tensor:
        """Which entries of the cache contain a token of any request: bool [num_pages, page_size]."""
        used = torch.zeros(self.num_pages * self.page_size, dtype=torch.bool)
        used[self.slots] = True
        return used.view(self.num_pages, self.page_size).to(device)

    @functools.cached_property
    def _flat(self) -> torch.Tensor:
        return torch.tensor([page for pages in self.pages for page in pages], dtype=torch.int64)

    @functools.cached_property
    def slots(self) -> torch.Tensor:
        """Positions of all tokens in the cache, flattened to [num_pages * page_size], request after request: int64
        [sum of their lengths], on the CPU."""
        every = self._flat[:, None] * self.page_size + torch.arange(self.page_size)
        own = [(length, len(pages)) for length, pages in zip(self.lengths, self.pages, strict=True)]
        pieces = torch.tensor(
            [size for length, pages in own for size in (length, pages * self.page_size - length)], dtype=torch.int64
        )
        belongs = torch.arange(len(pieces)) % 2 == 0
        return every.flatten()[belongs.repeat_interleave(pieces)]


def distinct_pages(lengths: Sequence[int], page_size: int, shared_prefix: int = 0) -> int:
    """Pages that a cache needs for requests of these lengths whose first `shared_prefix` pages are the same."""
    common = [min(shared_prefix, length // page_size) for length in lengths]
    own = sum(math.ceil(length / page_size) - shared for length, shared in zip(lengths, common, strict=True))
    return max(common, default=0) + own


def allocate_pages(
    lengths: Sequence[int], page_size: int, num_pages: int, shared_prefix: int, draws: Draws, in_a_row: bool = False
) -> PageTable:
    """Pages in random order, as after some time of serving, or one after the other, as in a new cache.

    Args:
        lengths: tokens of each request; 0 means a request without pages.
        page_size: tokens per page.
        num_pages: pages in the cache; if there are fewer than `distinct_pages`, requests share pages at random.
        shared_prefix: the number of first pages that all requests share (at most the full pages of each, because a
            partial last page belongs to one request).
        draws: the source of the random order.
        in_a_row: pages have the numbers 0, 1, 2, ..., request after request.

    Raises:
        ValueError: there are tokens, but no pages to hold them.
    """
    needed = distinct_pages(lengths, page_size, shared_prefix)
    if needed and not num_pages:
        raise ValueError(f"num_pages = 0 cannot hold {sum(lengths)} tokens")
    if needed <= num_pages and in_a_row:
        pool = list(range(num_pages))
    elif needed <= num_pages:
        pool = draws.permutation(num_pages).tolist()
    else:
        pool = draws.host_integers(needed, 0, num_pages - 1)
    prefix_pages = max((min(shared_prefix, length // page_size) for length in lengths), default=0)
    prefix, free = pool[:prefix_pages], iter(pool[prefix_pages:])
    pages = []
    for length in lengths:
        own = prefix[: min(shared_prefix, length // page_size)]
        own = own + [next(free) for _ in range(math.ceil(length / page_size) - len(own))]
        pages.append(tuple(own))
    return PageTable(tuple(lengths), page_size, num_pages, tuple(pages))


def spoil_request(
    table: PageTable, q_lens: Sequence[int], queries: torch.Tensor, caches: Sequence[torch.Tensor]
) -> None:
    """Makes one request NaN, the last but one with queries, in place: its queries, and the pages [num_pages, page_size,
    ...] that no other one shares. No kernel may read these for another request."""
    asking = [request for request, count in enumerate(q_lens) if count]
    if len(asking) < 2:
        return
    chosen = asking[-2]
    first = sum(q_lens[:chosen])
    queries[first : first + q_lens[chosen]] = math.nan
    others = {page for request, pages in enumerate(table.pages) if request != chosen for page in pages}
    own = torch.zeros(table.num_pages, dtype=torch.bool)
    own[[page for page in table.pages[chosen] if page not in others]] = True
    for cache in caches:
        cache.masked_fill_(own.to(cache.device).view(-1, *[1] * (cache.ndim - 1)), math.nan)


def spoil_unused(cache: torch.Tensor, used: torch.Tensor, kind: str) -> None:
    """Overwrites the entries of a cache [num_pages, page_size, ...] that are not `used`: see `UNUSED_KINDS` and
    `ALSO_LENGTHS`."""
    unused = ~used.view(*used.shape, *[1] * (cache.ndim - 2))
    if kind in ("nan", ALSO_LENGTHS):
        cache.masked_fill_(unused, math.nan)
    else:
        cache.mul_(torch.where(unused, 1000.0, 1.0).to(cache.dtype))


#: The scale of the logits as multiples of the one that models use: a kernel that has that one built in fails. Standard
#: deviations of the kinds of logits are those at the usual one.
SCALES = (1.0, 1.5, 0.6)
#: normal: logits with standard deviation 1. large: with standard deviation 20, so errors of the logits matter.
#: peaked: one key has nearly all the weight. uniform: all keys have the same weight. positive: values do not cancel.
#: Latent attention sums over 576 features but scales by 1 / sqrt(192), so at real sizes the standard deviations of its
#: logits are 1.7 and 35.
LOGIT_KINDS = ("normal", "large", "peaked", "uniform", "positive")
#: Only corners have the kinds spread, logits with standard deviation 200, so exp of their differences exceeds
#: float32's range; vast, with standard deviation 16000, so exp of one per cent of the largest exceeds it too, and
#: with one sign for each head, so all logits of a row are far below 0 or far above it (`give_signs`); and
#: beyond_float16, keys and values of normal ones times BEYOND_FLOAT16, and queries over it: the logits stay what they
#: are. A power of two scales every product, sum and rounding exactly, so the facts about a kernel for normal values
#: hold for these, unless it leaves the range of bf16 and float32.
BEYOND_FLOAT16 = 2.0**17
QUERY_SCALE = {"uniform": 0.0, "large": 20.0, "spread": 200.0, "vast": 16000.0, "beyond_float16": 1 / BEYOND_FLOAT16}
#: In corners with long requests: a third of the rows has nearly all the weight on the last key that it sees. A third
#: has it on a key at an edge of a tile or chunk (`AT_EDGES`), if it sees one. A third has normal logits.
EDGES = "edges"
PEAKED = ("peaked", EDGES)
AT_EDGES = tuple(edge + side for edge in (64, 128, 512, 1024) for side in (-1, 0))
#: Keys of a long request and the number of short ones, in corners for a CPU. Where heads are many and wide, the long
#: one has fewer keys, LEAST_LONG or more.
LONG, LEAST_LONG, MANY = 9000, 1000, 70
#: The products of one query with the keys of such a corner, over all heads, up to which it takes about a second.
PRODUCTS = 2**26
#: How far the one key of peaked logits is above the others, in nats.
PEAK = 14.0


@dataclass(frozen=True)
class AttentionOptions:
    """The plans that can be drawn for a kernel, beyond the limits of its axes.

    Attributes:
        unseeing_rows: whether to draw queries that attend to nothing although their request has keys.
        keyless: whether to draw batches without any keys.
        keyless_requests: whether to draw requests that have queries and no keys.
        nan_unused: whether entries of a cache that belong to no request may be NaN.
    """

    unseeing_rows: bool = True
    keyless: bool = True
    keyless_requests: bool = True
    nan_unused: bool = True


def softmax_scale(head_dim: int, factor: float = 1.0) -> float:
    return float(torch.tensor(head_dim**-0.5 * factor, dtype=torch.float32))


def usual_scale(head_dim: int | None = None) -> Fault:
    """The fault of a kernel that has the usual scale built in: that of so many features, by default of its queries."""

    def misread(inputs: Inputs, trial: FaultyCase) -> Inputs | None:
        usual = softmax_scale(inputs["q"].shape[-1] if head_dim is None else head_dim)
        return None if float(inputs["sm_scale"]) == usual else {**inputs, "sm_scale": usual}

    return with_inputs("sm_scale replaced by its usual value", misread)


def query_scale(kind: str) -> float:
    return QUERY_SCALE.get(kind, 1.0)


def value_scale(kind: str) -> float:
    return BEYOND_FLOAT16 if kind == "beyond_float16" else 1.0


def give_signs(kind: str, queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Makes vast logits negative for every other head of queries [total, heads, dim], and positive for the rest, in
    place: a maximum that starts at 0, or hidden keys whose logits are finite, show only where all logits are low."""
    if kind == "vast":
        keys.abs_()
        queries.abs_()[:, ::2].neg_()


@functools.cache
def token_counts(low: int, high: int, page_size: int) -> st.SearchStrategy[int]:
    """Lengths from low to high, with more weight on the ends, on powers of two, and on full pages +- one token."""
    edges = {pages * page_size + extra for pages in (1, 2, 3) for extra in (-1, 0, 1)}
    near = sorted(edge for edge in edges if low <= edge <= high)
    anything = sizes(low, high)
    return st.one_of(st.sampled_from(near), anything) if near else anything


def has_queries(definition: Definition) -> bool:
    """Whether requests have any number of queries (prefill) instead of one each (decode)."""
    return "qo_indptr" in definition.inputs


def draw_lengths(draw: Callable[[Any], Any], request: PlanRequest, page_size: int) -> Plan:
    """``kv_lens`` of the requests, ``q_lens`` if they have queries, and ``logits``, one of `LOGIT_KINDS`. Requests
    without keys or queries, more queries than keys, and lengths around full pages are drawn often."""
    # Offsets count one more than there are requests, and a Definition with lengths has none.
    more = int("len_indptr" in request.definition.var_axes)
    axis = ("len_indptr", 1, 6, 17) if more else ("batch_size", 0, 5, 16)
    low, high = (limit - more for limit in request.range(*axis))
    # An empty batch and a batch without keys prove nothing, so they are drawn rarely.
    batch_size = 0 if low == 0 and draw(st.integers(0, 30)) == 7 else draw(st.integers(max(1, low), high))
    options = request.options_of(AttentionOptions)
    keyless = options.keyless and draw(st.integers(0, 30)) == 7
    longest = 2000 if request.large else 40
    plan: Plan = {}
    if has_queries(request.definition):
        left = request.range("total_q", 0, 12, 256)[1]
        q_lens, kv_lens = [], []
        for request_number in range(batch_size):
            q_lens.append(draw(sizes(int(request_number == 0), left)))
            left -= q_lens[-1]
            # Keys are those of cached tokens, then those of the queries; if they are fewer, some rows have none.
            if not options.unseeing_rows or draw(st.integers(0, 3)):
                kv_lens.append(draw(token_counts(q_lens[-1], max(longest, q_lens[-1]), page_size)))
            else:
                kv_lens.append(draw(st.integers(0, q_lens[-1])))
        plan["q_lens"] = q_lens
    else:
        fewest = 0 if options.keyless_requests else 1
        kv_lens = [draw(token_counts(fewest, longest, page_size)) for _ in range(batch_size)]
    if batch_size >= 3 and options.keyless_requests and draw(st.integers(0, 3)) == 0:
        kv_lens[batch_size // 2] = 0
    if batch_size and not any(kv_lens) and not keyless:
        kv_lens[0] = max(longest // 2, *plan.get("q_lens", [0]))
    plan["kv_lens"] = kv_lens
    plan["logits"] = draw(st.sampled_from(LOGIT_KINDS))
    return plan


def corner_lengths(request: PlanRequest) -> list[Plan]:
    """Keys and values beyond float16's range, and, on a CPU only, logits whose spread exceeds float32's: it is not
    known what kernels round there, and flashinfer's took products near -5e4, which vast logits exceed, for masked ones.
    Normal ones have a request without keys, and queries that see none, unless the options forbid them; every other
    query sees a key. On a CPU also a long request, and MANY short ones, unless heads are too many and wide."""
    kinds = ("beyond_float16",) if request.large else ("beyond_float16", "spread", "vast", "normal")
    scales = {"beyond_float16": SCALES[2], "normal": SCALES[1]}
    plans: list[Plan] = [{"kv_lens": [300, 40], "logits": kind, "scale": scales.get(kind, SCALES[0])} for kind in kinds]
    q_lens = [[5, 9]] * len(plans)
    if not request.large:
        options = request.options_of(AttentionOptions)
        if options.keyless_requests:
            plans[-1]["kv_lens"], q_lens[-1] = [300, 0, 40], [5, 2, 9]
        if options.unseeing_rows:
            plans[-1]["kv_lens"].append(6)
            q_lens[-1] = [*q_lens[-1], 9]
        few = [1 + number % 3 for number in range(MANY)]
        short = [count + 7 * number % 29 for number, count in enumerate(few)]
        larger = {"logits": EDGES, "scale": SCALES[0]}
        products = products_of_a_key(request.definition)
        long = min(LONG, PRODUCTS // products)
        if long >= LEAST_LONG:
            plans.append({"kv_lens": [long, 40], **larger})
            q_lens.append([2, 9])
        if sum(short) * products <= PRODUCTS:
            plans.append({"kv_lens": [300, 40, *short], **larger})
            q_lens.append([5, 9, *few])
    if not has_queries(request.definition):
        return plans
    return [{**plan, "q_lens": own} for plan, own in zip(plans, q_lens, strict=True)]


def products_of_a_key(definition: Definition) -> int:
    axes = definition.const_axes
    latent = 2 * axes.get("head_dim_ckv", 0) + axes.get("head_dim_kpe", 0)
    both = axes["qk_dim"] + axes["vo_dim"] if "qk_dim" in axes else 2 * axes.get("head_dim", 0)
    return axes["num_qo_heads"] * (latent or both)


@dataclass(frozen=True)
class Requests(PlanShape):
    """Plans of requests that have lengths, a kind of logits, a scale, and places in a cache.

    Attributes:
        cache: the entry that counts pages (``num_pages``), or slots of tokens before the queries (``num_slots``); empty
            without a cache.
        special: corners; entries about the cache that they do not have are the usual ones.
        options: what every kernel of the family takes.
    """

    cache: str = ""
    special: Callable[[PlanRequest], Sequence[Plan]] = corner_lengths
    options: AttentionOptions | None = None

    def plans(self, request: PlanRequest) -> st.SearchStrategy[Plan]:
        return draw_requests(self, self._asked(request))

    def plan_for_axes(self, definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
        """Defaults: 4 requests, 8 queries in all, up to 64 keys each, or as many cached tokens."""
        batch_size = max(0, axes.get("batch_size", axes.get("len_indptr", 5) - 1))
        if "total_kv" in axes:
            stored = split(axes["total_kv"], batch_size, draws)
        elif "num_kv_indices" in axes or (self.cache and axes.get(self.cache) == 0):
            page_size = definition.const_axes.get("page_size", 1)
            pages = split(axes.get("num_kv_indices", 0), batch_size, draws)
            # The last page of a request with pages holds 1 to page_size tokens.
            missing = draws.host_integers(batch_size, 0, page_size - 1)
            stored = [count * page_size - m if count else 0 for count, m in zip(pages, missing, strict=True)]
        else:
            stored = draws.host_integers(batch_size, 1, 64)
        plan: Plan = {"kv_lens": stored, "logits": "normal", "scale": SCALES[0]}
        if has_queries(definition):
            plan["q_lens"] = split(axes.get("total_q", 8), batch_size, draws)
        if self.cache == "num_slots":
            plan["kv_lens"] = [old + new for old, new in zip(stored, plan["q_lens"], strict=True)]
        if self.cache in axes:
            plan[self.cache] = axes[self.cache]
        return self._cached(definition, plan)

    def corners(self, request: PlanRequest) -> Sequence[Plan]:
        asked = self._asked(request)
        plans = (self._cached(request.definition, plan) for plan in self.special(asked))
        if not self.cache or asked.options_of(AttentionOptions).nan_unused:
            return list(plans)
        return [{**plan, "unused": STALE} for plan in plans]

    def with_corners(self, corners: Callable[[PlanRequest], Sequence[Plan]]) -> Requests:
        return replace(self, special=corners)

    def pages(self, definition: Definition, plan: Plan) -> int:
        lengths = cached_lengths(plan) if self.cache == "num_slots" else plan["kv_lens"]
        return distinct_pages(lengths, definition.const_axes.get("page_size", 1), plan["shared_prefix"])

    def _asked(self, request: PlanRequest) -> PlanRequest:
        return request if self.options is None else replace(request, plan_options=self.options)

    def _cached(self, definition: Definition, plan: Plan) -> Plan:
        if not self.cache:
            return plan
        plan = {"shared_prefix": 0, "unused": UNUSED_KINDS[0], **plan}
        return {self.cache: self.pages(definition, plan), **plan}


@st.composite
def draw_requests(draw: Callable[[Any], Any], shape: Requests, request: PlanRequest) -> Plan:
    # Without pages, lengths around multiples of flashinfer's tile of keys are drawn often.
    page_size = request.definition.const_axes.get("page_size", 64 if request.large else 4)
    plan = draw_lengths(draw, request, page_size)
    if shape.cache:
        plan["shared_prefix"] = draw(st.sampled_from([0, 0, 1, 3]))
        needed = shape.pages(request.definition, plan)
        plan[shape.cache] = max(request.limits.get(shape.cache, (0, 0))[0], needed + draw(st.integers(0, 3)))
        nan_unused = request.options_of(AttentionOptions).nan_unused
        plan["unused"] = draw(st.sampled_from(UNUSED_KINDS)) if nan_unused else STALE
    plan["scale"] = draw(st.sampled_from(SCALES))
    return plan


def cached_lengths(plan: Plan) -> list[int]:
    return [total - new for total, new in zip(plan["kv_lens"], plan["q_lens"], strict=True)]


def add_peaks(
    kind: str,
    queries: torch.Tensor,
    keys: torch.Tensor,
    q_lens: list[int],
    kv_lens: list[int],
    sm_scale: float,
    draws: Draws,
    slots: torch.Tensor | None = None,
) -> None:
    """For logits that are peaked, or at `EDGES`, adds a multiple of a key to queries of its request, which raises the
    logit of that key by PEAK: of one key for all queries of a request, or of another one for each query and head.

    Args:
        kind: of the logits; of another kind nothing changes.
        queries: those of all requests, [total, heads, dim]; changed in place.
        keys: of all slots, [slots, num_kv_heads, dim].
        q_lens, kv_lens: lengths of the requests.
        sm_scale: the scale of the logits.
        draws: chooses the keys.
        slots: of the keys of all requests, request after request, on the CPU; by default, keys are in this order.
    """
    if kind not in PEAKED:
        return
    heads, kv_heads = queries.shape[1], keys.shape[1]
    lengths, counts = torch.tensor([kv_lens, q_lens]).long()
    owner = torch.arange(len(q_lens)).repeat_interleave(counts)
    starts = lengths.cumsum(0) - lengths
    if kind == "peaked":
        numbers = torch.tensor(draws.host_integers(len(kv_lens), 0, 2**31 - 1), dtype=torch.int64)
        position = (numbers % lengths.clamp_min(1)).where(lengths > 0, -1)[owner, None].expand(-1, heads)
    else:
        row = torch.arange(len(owner))
        seen = (row - (counts.cumsum(0) - lengths)[owner] + 1)[:, None]
        turn = row[:, None] + torch.arange(heads)
        edge = torch.tensor(AT_EDGES)[(turn // 3 + 2 * row[:, None] + draws.host_integers(1, 0, 7)[0]) % len(AT_EDGES)]
        position = torch.where(turn % 3 == 0, seen - 1, torch.where((turn % 3 == 2) & (edge < seen), edge, -1))
    row, head = (position >= 0).nonzero().T
    token = starts[owner[row]] + position[row, head]
    token = (token if slots is None else slots[token]).to(keys.device)
    row, head = row.to(keys.device), head.to(keys.device)
    key = keys[token, head // (heads // kv_heads)].float()
    boost = key * (PEAK / sm_scale / key.square().sum(dim=-1, keepdim=True).clamp_min(math.ulp(1.0)))
    queries.view(-1, queries.shape[2]).index_add_(0, row * heads + head, boost)


#: The queries of grouped-query and of latent attention.
QUERIES = ("q", "q_nope", "q_pe")


def corners(request: PlanRequest) -> list[Plan]:
    """The plans of `corner_lengths`; before them, one whose three requests share their first two pages, with up to 70
    queries, since requests that are drawn on a CPU fill one page of usual size at most."""
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
