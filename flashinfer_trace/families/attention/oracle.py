"""The float64 oracle of attention over given keys and values, and the quantities from which bounds are computed.

Query heads are sorted by the key-value head h // (num_qo_heads / num_kv_heads) that they share, where the references
reshape heads into groups. Sinks are keys, and a window makes each query a request (see `variants`), where the
references correct the softmax and hide keys.

A GPU takes longer to be told an operation than to do it: what a row's keys are needed for is computed batch by batch,
and all that follows from it once for all rows (`rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention import rows
from flashinfer_trace.families.attention.rounding import FLOAT32
from flashinfer_trace.families.attention.tiles import Batch, Memory, Sizes, batches
from flashinfer_trace.verdict.compare import Expected, summation_error

#: (weights p [tiles * heads, rows, n], values [tiles * heads, n, value_dim], keys of each tile [tiles]) -> bounds on
#: the sum of |partial outputs| and on the sum of their squares over the chunks into which a kernel may split the keys,
#: both [tiles * heads, rows, value_dim].
Split = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: flashinfer splits the keys of a request into chunks of at least this many tokens (scheduler.cuh: max(128 / page_size,
#: 1) pages), but otherwise of any number of pages. Bounds are therefore computed from pieces: each end of a chunk cuts
#: at most one piece, or none if a piece is a page.
SMALLEST_CHUNK = 128
PIECE = 16


def any_chunks(page_size: int = 1) -> Split:
    """For kernels that split keys into chunks of any length from SMALLEST_CHUNK on, in whole pages."""

    def split(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        absolute = partial_outputs(p, values, counts, page_size)
        return absolute, absolute.square()

    return split


def expected_outputs(
    q: torch.Tensor, memory: Memory, sm_scale: float, causal: bool, split: Split, cap: float | None = None
) -> dict[str, Expected]:
    """Expected output [queries, heads, value_dim] and lse [queries, heads]; queries align with the end of the keys.

    `split` describes how kernels may split the keys; `cap` caps the logits if it is given. The parts of both are those
    of `rows.expected`.
    """
    sums = Sums.of(q, memory, cap is not None)
    kv_heads, group = sums.heads.shape
    sizes = Sizes(kv_heads * group, kv_heads, q.shape[2], memory.values.shape[2], PIECE)
    # One row more, for what stands for no query.
    rows_of_q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 1))
    for batch in batches(memory, sizes, causal, len(q)):
        index = batch.rows[:, None, None], sums.heads.unsqueeze(2)
        queries = rows_of_q[index].double().mul_(float(sm_scale))
        keys, values = (
            each[batch.slots].transpose(1, 2).to(torch.float64, memory_format=torch.contiguous_format).flatten(0, 1)
            for each in (memory.keys, memory.values)
        )
        sums.add(index, batch, *attention(queries, keys, values, batch, split, cap))
    return rows.expected(*sums.by_name(len(q)))


@dataclass(frozen=True)
class Sums:
    """What is summed over the keys of each row; the row after the last query is for padding.

    Attributes:
        heads: query heads by the key-value head that they share, int64 [key-value heads, heads of a group].
        elements: the sums of `rows.ELEMENTS`, [sums, queries + 1, heads, value_dim], float64.
        rows: the sums of `rows.ROWS`, [sums, queries + 1, heads], float64.
        more: names of sums after those, of elements and of rows.
    """

    heads: torch.Tensor
    elements: torch.Tensor
    rows: torch.Tensor
    more: tuple[str, ...] = ()

    @classmethod
    def of(cls, q: torch.Tensor, memory: Memory, capped: bool) -> Sums:
        """The sums of queries that see no key."""
        kv_heads, value_dim = memory.values.shape[1:]
        more = (rows.CAPPED,) if capped else ()
        shape = (len(q) + 1, q.shape[1])
        elements = q.new_zeros(len((*rows.ELEMENTS, *more)), *shape, value_dim, dtype=torch.float64)
        by_row = q.new_zeros(len((*rows.ROWS, *more)), *shape, dtype=torch.float64)
        by_row[rows.ROWS.index("top")] = -torch.inf
        return cls(heads_of(q.shape[1], kv_heads, q.device), elements, by_row, more)

    def by_name(self, count: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The sums of the first `count` rows: elements [count, heads, value_dim], rows [count, heads]."""
        return (
            dict(zip((*rows.ELEMENTS, *self.more), self.elements[:, :count].unbind(), strict=True)),
            dict(zip((*rows.ROWS, *self.more), self.rows[:, :count].unbind(), strict=True)),
        )

    def add(
        self,
        index: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        elements: dict[str, torch.Tensor],
        by_row: dict[str, torch.Tensor],
    ) -> None:
        """Writes the sums that `attention` computed of a batch; `index` are the queries and heads of its rows."""
        shape = (len(batch.rows), *self.heads.shape, batch.rows.shape[1])
        by_row["length"] = batch.visible.double()[:, None, None].expand(shape).reshape(by_row["top"].shape)
        found = torch.stack([elements[name] for name in (*rows.ELEMENTS, *self.more)])
        self.elements[:, index[0], index[1]] = found.view(len(found), *shape, -1)
        found = torch.stack([by_row[name] for name in (*rows.ROWS, *self.more)])
        self.rows[:, index[0], index[1]] = found.view(len(found), *shape)


@functools.lru_cache(maxsize=256)
def heads_of(count: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """Query heads by the key-value head that they share, int64 [key-value heads, heads of a group]."""
    shared = torch.arange(count) // (count // kv_heads)
    return shared.argsort(stable=True).view(kv_heads, -1).to(device)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    split: Split,
    cap: float | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The sums of `rows.ELEMENTS` [tiles * key-value heads, rows, value_dim], and those of `rows.ROWS` but the length.

    Those of rows that see no key are NaN.

    Args:
        queries: scaled [tiles, key-value heads, heads of a group, queries, dim]; rows are heads of a group, then
            queries.
        keys, values: [tiles * key-value heads, n, ...].
        batch: which keys are seen.
        split, cap: as in `expected_outputs`.
    """
    scaled = queries.flatten(0, 1).flatten(1, 2)
    logits = scaled.bmm(keys.mT)
    if cap is not None:
        logits = logits.div_(cap).tanh_().mul_(cap)
    # Errors of the sum of products, the scale, its product with log2(e), and the subtraction of the maximum; of a cap,
    # its reciprocal, tanh within 2 ulp (4 of these), and the product. The cap does not increase errors before it.
    roundings = 4 if cap is None else 12
    bounds = summation_error(scaled.abs(), scaled.shape[2])
    p_error = logits.abs().baddbmm_(bounds, keys.abs().mT, beta=roundings * FLOAT32)
    by_query = logits.view(*queries.shape[:4], -1)  # the heads of a group apart
    seen = by_query.masked_fill(batch.hidden[:, None, None], -torch.inf).view_as(logits)
    p = seen.softmax(dim=2)
    largest = p.amax(dim=2, keepdim=True)
    rest = p.masked_fill(p == largest, 0.0)
    p_error.mul_(p)
    logit_squares, rest_squares = p_error.square(), rest.square()
    magnitudes, value_squares = values.abs(), values.square()
    value = p.bmm(values)
    partial, partial_squares = split(p, values, batch.counts)
    elements = {
        "value": value,
        "weighted": p.bmm(magnitudes),
        "squared_logit": logit_squares.bmm(value_squares),
        "rest": rest.bmm(magnitudes),
        "squared_rest": rest_squares.bmm(value_squares),
        "partial": partial,
        "squared_partial": partial_squares,
    }
    along, size = value.bmm(values.mT), value.square().sum(dim=2)
    # The larger of |along| and |along - size|, because the size is not negative.
    moves = along.maximum(size.unsqueeze(2) - along).mul_(rest)
    norm = torch.linalg.vector_norm
    by_row = {
        "top": seen.amax(dim=2),
        "largest": largest.squeeze(2),
        "squared_lse_logit": logit_squares.sum(dim=2),
        "others": rest.sum(dim=2),
        "squared_others": rest_squares.sum(dim=2),
        "size": size,
        "gain_logit": norm(p_error.mul_(along), dim=2),
        "gain_keys": norm(along.mul_(p), 1, dim=2),
        "gain_moves": moves.sum(dim=2),
        "norm_of_moves": norm(moves, dim=2),
    }
    if cap is not None:
        capped = logits.abs_().mul_(p)
        elements[rows.CAPPED], by_row[rows.CAPPED] = capped.bmm(magnitudes), capped.sum(dim=2)
    return elements, by_row


def partial_outputs(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, page_size: int = 1) -> torch.Tensor:
    """A bound on the sum of |partial outputs| over the chunks into which the keys may be split: see `Split`.

    A chunk consists of whole pieces and of what its ends cut off two others. The whole pieces add up to at most the sum
    of |pieces|, and the cut parts of one piece to at most its sum of p |v|; n keys have fewer than n / SMALLEST_CHUNK
    cuts. Pages of PIECE or more tokens are pieces themselves, and no end cuts them. Keys that fit in one chunk are not
    split, so their bound is zero. The bound is at most sum p |v|.
    """
    shape, most = (len(p), p.shape[1], values.shape[2]), values.shape[1]
    if most <= SMALLEST_CHUNK:
        return p.new_zeros(shape)
    weights, by_piece = in_pieces(p, values, max(PIECE, page_size))
    by_shape = len(p), -1, *shape[1:]
    bound: torch.Tensor = torch.linalg.vector_norm(weights.bmm(by_piece).view(by_shape), 1, dim=1)
    cuts = ((counts - 1) // SMALLEST_CHUNK).view(-1, 1, 1, 1)
    by_tile = len(counts), -1, *shape[1:]
    if page_size < PIECE:
        absolute = weights.bmm(by_piece.abs()).view(by_shape)
        # In float32, whose selection takes a GPU half as long: the bound is 2^-24 of itself off.
        largest = absolute.float().topk((most - 1) // SMALLEST_CHUNK, dim=1).values.double()
        number = torch.arange(largest.shape[1], device=p.device).view(-1, 1, 1)
        beyond = (number >= cuts).unsqueeze(1)
        largest.view(len(counts), -1, *largest.shape[1:]).masked_fill_(beyond, 0.0)
        bound = bound.add_(largest.sum(dim=1)).minimum(absolute.sum(dim=1))
    return bound.view(by_tile).masked_fill_(cuts <= 0, 0.0).view(shape)


def in_pieces(p: torch.Tensor, values: torch.Tensor, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [tiles * heads * pieces, rows, piece] and values [tiles * heads * pieces, piece, value_dim] by piece."""
    padding = -values.shape[1] % piece
    if padding:
        p = torch.nn.functional.pad(p, (0, padding))
        values = torch.nn.functional.pad(values, (0, 0, 0, padding))
    by_piece = values.reshape(-1, piece, values.shape[2])
    weights = p.view(*p.shape[:2], -1, piece).transpose(1, 2).reshape(len(by_piece), -1, piece)
    return weights, by_piece
