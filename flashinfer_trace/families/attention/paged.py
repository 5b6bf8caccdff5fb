"""Building blocks of paged key-value caches: the pages of requests, and the entries that no kernel may read."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashinfer_trace.harness.inputs import Draws, indptr

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
    lengths: Sequence[int],
    page_size: int,
    num_pages: int,
    shared_prefix: int,
    draws: Draws,
    in_a_row: bool = False,
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
    """Makes one request NaN, the last but one with queries: its queries, and the pages that no other one shares; no
    kernel may read these for another request. Nothing is done where there is one request.

    Args:
        table: of the caches, [num_pages, page_size, ...] each, which are changed in place.
        q_lens: the queries of each request.
        queries: those of all requests, changed in place.
    """
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
