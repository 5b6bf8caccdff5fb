"""The float64 oracle of attention over given keys and values, and the quantities from which bounds are computed.

Query heads are sorted by the key-value head h // (num_qo_heads / num_kv_heads) that they share, and weights are
normalised before the product with the values. The references instead reshape heads into groups and divide after that
product.

A GPU takes longer to be told an operation than to do it: what a row's keys are needed for is computed batch by batch,
and all that follows from it once for all rows (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention import rows
from flashinfer_trace.families.attention.rounding import FLOAT32
from flashinfer_trace.families.attention.tiles import Batch, Memory, Sizes, batches
from flashinfer_trace.harness.compare import Expected, summation_error

__all__ = ["Split", "any_chunks", "expected_outputs", "in_pieces", "partial_outputs"]

#: (weights p [tiles, heads, rows, n], values [tiles, heads, n, value_dim], keys of each tile [tiles]) -> bounds on the
#: sum of |partial outputs| and on the sum of their squares over the chunks into which a kernel may split the keys, both
#: [tiles, heads, rows, value_dim].
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
    sums = Sums.of(q, memory, sm_scale, cap is not None)
    kv_heads, group = sums.heads.shape
    sizes = Sizes(kv_heads * group, kv_heads, q.shape[2], memory.values.shape[2], PIECE)
    for batch in batches(memory, sizes, causal, len(q)):
        keys, values = (
            each[batch.slots].transpose(1, 2).to(torch.float64, memory_format=torch.contiguous_format)
            for each in (memory.keys, memory.values)
        )
        sums.add(batch, *attention(sums.queries_of(batch), keys, values, batch, split, cap))
    return rows.expected(*sums.by_name(len(q)))


@dataclass(frozen=True)
class Sums:
    """What is summed over the keys of each row; the row after the last query is for padding.

    Attributes:
        queries: float64 [2, queries + 1, key-value heads, heads of a group, dim]: scaled, and as `summation_error` of
            their absolute values, which is a bound on errors of the logits if multiplied with absolute keys.
        heads: query heads by the key-value head that they share, int64 [key-value heads, heads of a group].
        elements: the sums of `rows.ELEMENTS`, [sums, queries + 1, heads, value_dim], float64.
        rows: the sums of `rows.ROWS`, [sums, queries + 1, heads], float64.
        more: names of sums after those, of elements and of rows.
    """

    queries: torch.Tensor
    heads: torch.Tensor
    elements: torch.Tensor
    rows: torch.Tensor
    more: tuple[str, ...] = ()

    @classmethod
    def of(cls, q: torch.Tensor, memory: Memory, sm_scale: float, capped: bool) -> Sums:
        """The sums of queries that see no key."""
        count, dim = q.shape[1:]
        kv_heads, value_dim = memory.values.shape[1:]
        heads = (torch.arange(count, device=q.device) // (count // kv_heads)).argsort(stable=True).view(kv_heads, -1)
        scaled = torch.nn.functional.pad(q.double()[:, heads] * float(sm_scale), (0, 0, 0, 0, 0, 0, 0, 1))
        more = (rows.CAPPED,) if capped else ()
        elements = scaled.new_zeros(len((*rows.ELEMENTS, *more)), len(q) + 1, count, value_dim)
        by_row = scaled.new_zeros(len((*rows.ROWS, *more)), len(q) + 1, count)
        by_row[rows.ROWS.index("top")] = -torch.inf
        return cls(torch.stack([scaled, summation_error(scaled.abs(), dim)]), heads, elements, by_row, more)

    def by_name(self, count: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The sums of the first `count` rows: elements [count, heads, value_dim], rows [count, heads]."""
        return (
            dict(zip((*rows.ELEMENTS, *self.more), self.elements[:, :count].unbind(), strict=True)),
            dict(zip((*rows.ROWS, *self.more), self.rows[:, :count].unbind(), strict=True)),
        )

    def queries_of(self, batch: Batch) -> torch.Tensor:
        """[2, tiles, key-value heads, rows, dim]: rows are heads of a group, then queries."""
        return self.queries[:, batch.rows].permute(0, 1, 3, 4, 2, 5).flatten(3, 4)

    def add(self, batch: Batch, elements: dict[str, torch.Tensor], by_row: dict[str, torch.Tensor]) -> None:
        """Writes the sums that `attention` computed of a batch, but for their order in memory."""
        index = slice(None), batch.rows.unsqueeze(2), self.heads.flatten()
        shape = (len(batch.rows), *self.heads.shape, batch.rows.shape[1])
        in_order = [elements[name].view(*shape, -1).permute(0, 3, 1, 2, 4) for name in (*rows.ELEMENTS, *self.more)]
        self.elements[index] = torch.stack(in_order).flatten(3, 4)
        by_row["length"] = batch.visible.double()[:, None, None].expand(shape)
        in_order = [by_row[name].view(shape).permute(0, 3, 1, 2) for name in (*rows.ROWS, *self.more)]
        self.rows[index] = torch.stack(in_order).flatten(3, 4)


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Batch,
    split: Split,
    cap: float | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The sums of `rows.ELEMENTS` [tiles, heads, rows, value_dim], and those of `rows.ROWS` but the length.

    Args:
        queries: of `Sums.queries_of`.
        keys, values: [tiles, key-value heads, n, ...].
        batch: which keys are seen.
        split, cap: as in `expected_outputs`.
    """
    scaled, bounds = queries.unbind()
    logits = scaled @ keys.mT
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    by_query = (*logits.shape[:2], -1, *batch.rows.shape[1:], keys.shape[2])  # the heads of a group apart
    hidden = batch.hidden[:, None, None]
    seen = logits.view(by_query).masked_fill(hidden, -torch.inf)
    # Rows that see no key have weights 0, not NaN.
    p = seen.softmax(dim=-1).masked_fill_(hidden, 0.0).view_as(logits)
    largest = p.amax(dim=-1, keepdim=True)
    rest = p.masked_fill(p == largest, 0.0)
    # Errors of the sum of products, the scale, its product with log2(e), and the subtraction of the maximum; of a cap,
    # its reciprocal, tanh within 2 ulp (4 of these), and the product. The cap does not increase errors before it.
    roundings = 4 if cap is None else 12
    p_error = torch.add(bounds @ keys.abs().mT, logits.abs(), alpha=roundings * FLOAT32).mul_(p)
    magnitudes, squares = values.abs(), values.square()
    value = p @ values
    partial, partial_squares = split(p, values, batch.counts)
    elements = {
        "value": value,
        "weighted": p @ magnitudes,
        "squared_logit": p_error.square() @ squares,
        "rest": rest @ magnitudes,
        "squared_rest": rest.square() @ squares,
        "partial": partial,
        "squared_partial": partial_squares,
    }
    norm = torch.linalg.vector_norm
    along = value @ values.mT
    weighted = p * along
    row_size = weighted.sum(dim=-1, keepdim=True)
    # The larger of |along| and |along - row_size|, because row_size is not negative.
    moves = along.maximum(row_size - along).mul_(rest)
    by_row = {
        "top": seen.amax(dim=-1),
        "largest": largest,
        "lse_logit": norm(p_error, dim=-1),
        "others": rest.sum(dim=-1),
        "norm_of_others": norm(rest, dim=-1),
        "gain_logit": norm(p_error * along, dim=-1),
        "gain_keys": norm(weighted, 1, dim=-1),
        "gain_moves": moves.sum(dim=-1),
        "norm_of_moves": norm(moves, dim=-1),
    }
    if cap is not None:
        size = p * logits.abs()
        elements[rows.CAPPED], by_row[rows.CAPPED] = size @ magnitudes, size.sum(dim=-1)
    return elements, by_row


def partial_outputs(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, page_size: int = 1) -> torch.Tensor:
    """A bound on the sum of |partial outputs| over the chunks into which the keys may be split: see `Split`.

    A chunk consists of whole pieces and of what its ends cut off two others. The whole pieces add up to at most the sum
    of |pieces|, and the cut parts of one piece to at most its sum of p |v|; n keys have fewer than n / SMALLEST_CHUNK
    cuts. Pages of PIECE or more tokens are pieces themselves, and no end cuts them. Keys that fit in one chunk are not
    split, so their bound is zero. The bound is at most sum p |v|.
    """
    most = values.shape[2]
    if most <= SMALLEST_CHUNK:
        return p.new_zeros(*p.shape[:3], values.shape[3])
    weights, by_piece = in_pieces(p, values, max(PIECE, page_size))
    cuts = ((counts - 1) // SMALLEST_CHUNK).view(-1, 1, 1, 1)
    whole: torch.Tensor = (weights @ by_piece).abs_().sum(dim=2)
    if page_size >= PIECE:
        return whole.masked_fill_(cuts <= 0, 0.0)
    absolute = weights @ by_piece.abs()
    # In float32, whose selection takes a GPU half as long: the bound is 2^-24 of itself off.
    largest = absolute.float().topk((most - 1) // SMALLEST_CHUNK, dim=2).values.double()
    number = torch.arange(largest.shape[2], device=p.device).view(-1, 1, 1)
    cut = largest.masked_fill_(number >= cuts.unsqueeze(4), 0.0).sum(dim=2)
    return whole.add_(cut).minimum(absolute.sum(dim=2)).masked_fill_(cuts <= 0, 0.0)


def in_pieces(p: torch.Tensor, values: torch.Tensor, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [tiles, heads, pieces, rows, piece] and values [tiles, heads, pieces, piece, value_dim] by piece."""
    pieces = -(-values.shape[2] // piece)
    padding = pieces * piece - values.shape[2]
    weights = torch.nn.functional.pad(p, (0, padding))
    by_piece = torch.nn.functional.pad(values, (0, 0, 0, padding))
    return (
        weights.view(*p.shape[:3], pieces, piece).transpose(2, 3),
        by_piece.view(*values.shape[:2], pieces, piece, values.shape[3]),
    )
