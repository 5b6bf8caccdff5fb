"""The float64 oracle of attention over given keys and values, and the quantities from which bounds are computed.

Query heads are sorted by the key-value head h // (num_qo_heads / num_kv_heads) that they share, where the references
reshape heads into groups. Sinks are keys, and a window makes each query a request (see `variants`), where the
references correct the softmax and hide keys.

A GPU takes longer to be told an operation than to do it: what a row's keys are needed for is computed batch by batch,
and all that follows from it once for all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention.policies import FLOAT32, FLUSHED, LOG2_E, SMALLEST
from flashinfer_trace.verdict.compare import CONFIDENCE, Expected, summation_error

#: Sums over the keys of a row, per element of the output, where p are the weights, v the values, e the errors of the
#: logits, and *rest* the weights without the largest: sum p v, sum p |v|, sum p^2 e^2 v^2, sum rest |v|,
#: sum rest^2 v^2, and what `Split` gives.
ELEMENTS = ("value", "weighted", "squared_logit", "rest", "squared_rest", "partial", "squared_partial")
#: And per row, with o for the output: visible keys, the largest logit and the largest weight, what is lost of `FLUSHED`
#: weights; sum p^2 e^2; sum rest and sum rest^2; <o, o>; the root of sum (p e <v, o>)^2; sum p |<v, o>|; sum of the
#: moves, rest times the larger of |<v, o>| and |<v - o, o>|, and the root of the sum of their squares.
ROWS = (
    *("length", "top", "largest", FLUSHED, "squared_lse_logit", "others", "squared_others"),
    *("size", "gain_logit", "gain_keys", "gain_moves", "norm_of_moves"),
)
#: Where logits c are capped: sum p |c| |v| per element, and sum p |c| per row.
CAPPED = "capped"
#: Sums over rows that bound the gain of an output: how far one rounding of the weights, of the partial
#: outputs or of the output can move it. settled: in rows with a dominating key; worst: in all other rows; squares: the
#: squares in those other rows.
ROUNDED = ("weights", "partial", "output")
#: A row that gives more than this weight to one key rounds like a multiple of that key: see `gains`.
SETTLED = 0.9


def expected(element: dict[str, torch.Tensor], row: dict[str, torch.Tensor]) -> dict[str, Expected]:
    """Expected output and lse from the sums of ELEMENTS [queries, heads, value_dim] and ROWS, all float64.

    Parts of both, where p are the exact weights, v the values and o the output:

    - ``weighted``: sum p |v|; ``length``: visible keys; ``lse``: the exact lse (0 for rows without keys),
    - ``lse_logit``: sqrt(sum p^2 e^2), the effect of float32 errors e of the logits on the natural lse; ``logit``: the
      effect on an output, sqrt(sum p^2 e^2 v^2) + |o| ``lse_logit``, which bounds sqrt(sum p^2 e^2 (v - o)^2),
    - ``weights``: the effect on sum p v of relative errors of at most 1, independent from key to key, in all weights
      but the largest: the smaller of sum p |v| and 8 sqrt(sum p^2 v^2); ``others`` and ``squared_others``: sum p and
      sum p^2 over the same keys. In kernels that subtract the maximum, the largest weight is exp(0) = 1, never rounded,
    - ``partial``: a bound on the sum of |partial outputs|, however a kernel splits the keys; and `FLUSHED`,
    - ``gain_*``: the same, projected on the output and summed over it (see `policies.gain_limit`),
    - ``capped``, only if the logits c are capped: sum p |c| |v| + |o| sum p |c| for an output, which bounds the sum of
      p |c| |v - o|, and sum p |c| for the lse.
    """
    # The largest weight is exp(top - lse); without a key, it is 0, and the lse is -inf like the largest logit.
    smallest = torch.finfo(torch.float64).tiny
    lse = (row["top"] - row["largest"].clamp_min(smallest).log_()).mul_(LOG2_E)
    parts = {
        "lse": lse.nan_to_num(neginf=0.0),
        "length": row["length"],
        "lse_logit": row["squared_lse_logit"].sqrt(),
        "others": row["others"],
        "squared_others": row["squared_others"],
    }
    value, size = element["value"], element["value"].abs()
    output = {
        "weighted": element["weighted"],
        "logit": torch.addcmul(element["squared_logit"].sqrt(), size, parts["lse_logit"].unsqueeze(-1)),
        "weights": element["rest"].minimum(element["squared_rest"].sqrt().mul_(CONFIDENCE)),
        "partial": element["partial"],
        FLUSHED: row[FLUSHED].add(row["length"].div(16).ceil_(), alpha=SMALLEST).unsqueeze(-1),
        **{name: part.unsqueeze(-1) for name, part in parts.items()},
        **gains(element, row, size),
    }
    if CAPPED in row:
        output[CAPPED] = torch.addcmul(element[CAPPED], size, row[CAPPED].unsqueeze(-1))
        parts[CAPPED] = row[CAPPED]
    return {"output": Expected(value, output), "lse": Expected(lse, parts)}


def gains(
    element: dict[str, torch.Tensor], row: dict[str, torch.Tensor], size: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The ``gain_*`` parts: the errors of each row projected on its output, and summed over all rows. Each key's error
    moves the output toward that key, or, where the denominator has the same error, toward it and away from the output.
    `size` are the absolute values of the output."""
    squares, row_size = size.square(), row["size"]
    factors = torch.stack([element["partial"], element["squared_partial"], squares])
    of_partial, of_partial_squares, of_output_squares = factors.mul_(torch.stack([size, squares, squares])).sum(dim=-1)
    rows = {
        "size": row_size,
        "logit": (row["gain_logit"].square() + row_size.square() * row["squared_lse_logit"]) * 2,
        "keys": row["gain_keys"] + row_size,
        "worst_weights": row["gain_moves"],
        "worst_partial": of_partial,
        "worst_output": row_size,
        "squares_weights": row["norm_of_moves"].square(),
        "squares_partial": of_partial_squares,
        "squares_output": of_output_squares,
    }
    # Where one key has nearly all the weight, all elements are a little less than its bf16 values and round to them:
    # the errors have one sign. Elsewhere roundings are independent from element to element and from key to key.
    settled = (row["largest"] > SETTLED).flatten()
    sides = torch.stack([settled, ~settled], dim=1).double()
    total = torch.stack(list(rows.values())).flatten(1) @ sides
    settled_rows, other_rows, all_rows = (
        dict(zip(rows, of_side.unbind(), strict=True)) for of_side in (*total.unbind(dim=1), total.sum(dim=1))
    )
    return {
        **{f"gain_{name}": all_rows[name] for name in ("size", "logit", "keys")},
        **{f"gain_settled_{name}": settled_rows[f"worst_{name}"] for name in ROUNDED},
        **{f"gain_{name}": other_rows[name] for name in rows if name.startswith(("worst", "squares"))},
    }


#: Elements of the largest temporary.
BLOCK_ELEMENTS = 2**26
#: So many more elements take as long as one batch more does, by kind of device.
BATCH_ELEMENTS = {"cpu": 2**13, "cuda": 2**22}
#: More keys than UNPADDED, which may be split, are padded to a multiple of WHOLE, so pieces of them need no copy.
UNPADDED, WHOLE = 128, 64


@dataclass(frozen=True)
class Memory:
    """Requests, and where their keys and values are.

    Attributes:
        keys, values: of all slots, [slots, num_kv_heads, dim].
        queries: offsets of the requests' queries, one more than there are requests.
        lengths: keys of each request.
        slots: (numbers of requests [n, 1], positions [n, k]) -> the slots of their tokens at these positions [n, k].
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: Sequence[int]
    lengths: Sequence[int]
    slots: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """The memory for one query and one key of a request: elements of the largest temporaries."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    piece: int

    def of(self, queries: int, keys: int) -> int:
        return queries * self.of_query(keys) + self.kv_heads * keys * (self.key_dim + self.value_dim)

    def of_query(self, keys: int) -> int:
        return self.heads * max(keys * self.value_dim // self.piece, keys, self.value_dim)


@dataclass(frozen=True)
class Tile:
    """Queries first to end - 1 of a request, the last of which sees `keys` keys."""

    request: int
    first: int
    end: int
    keys: int

    @property
    def queries(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Batch:
    """Tiles that are computed together, padded to the largest of them.

    Attributes:
        rows: the query of each row, int64 [tiles, queries]; past the last one for padding and rows without keys.
        visible: how many keys it sees, the first ones of its request [tiles, queries]; 0 for padding.
        counts: keys that the last query of each tile sees, [tiles].
        slots: of the keys, [tiles, keys]; the last one of the request again where a key is padding.
    """

    rows: torch.Tensor
    visible: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor

    @property
    def hidden(self) -> torch.Tensor:
        """Which keys a query does not see: bool [tiles, queries, keys]."""
        return torch.arange(self.slots.shape[1], device=self.slots.device) >= self.visible.unsqueeze(2)


def tiles_of(memory: Memory, sizes: Sizes, causal: bool) -> Iterator[Tile]:
    """All queries that see a key; as many of a request together as fit BLOCK_ELEMENTS."""
    for request, length in enumerate(memory.lengths):
        first, end = memory.queries[request : request + 2]
        step = max(1, BLOCK_ELEMENTS // sizes.of_query(length)) if length else 1
        for start in range(first, end, step):
            stop = min(start + step, end)
            keys = length - (end - stop) if causal else length
            if keys > 0:
                yield Tile(request, start, stop, keys)


def gathered(tiles: Sequence[Tile], sizes: Sizes, overhead: int) -> Iterator[list[Tile]]:
    """Tiles of similar sizes, as long as their padding is less than `overhead` elements a tile."""
    together: list[Tile] = []
    used = 0
    for tile in sorted(tiles, key=lambda tile: (tile.keys, tile.queries), reverse=True):
        queries = max(each.queries for each in (*together, tile))
        padded = (len(together) + 1) * sizes.of(queries, (*together, tile)[0].keys)
        if together and padded > min(BLOCK_ELEMENTS, used + sizes.of(tile.queries, tile.keys) + overhead):
            yield together
            together, padded = [], sizes.of(tile.queries, tile.keys)
        together.append(tile)
        used = padded
    if together:
        yield together


def batches(memory: Memory, sizes: Sizes, causal: bool, padding: int) -> Iterator[Batch]:
    """All queries that see a key, in batches; `padding` is the row that stands for no query."""
    device = memory.keys.device
    chosen = list(gathered(list(tiles_of(memory, sizes, causal)), sizes, BATCH_ELEMENTS[device.type]))
    if not chosen:
        return
    some = [request for request, length in enumerate(memory.lengths) if length]
    place = {request: number for number, request in enumerate(some)}
    requests = torch.tensor([[request, memory.lengths[request]] for request in some])
    # Computed on the CPU, and sent at once: a GPU takes longer to be told each step.
    tables = [requests, *(table_of(tiles, place, causal, padding) for tiles in chosen)]
    sent = torch.cat([table.flatten() for table in tables]).to(device)
    parts = torch.split(sent, [table.numel() for table in tables])
    requests, *tables = (part.view_as(table) for part, table in zip(parts, tables, strict=True))
    slots = slots_of(memory, requests)
    for tiles, table in zip(chosen, tables, strict=True):
        wide = table.shape[1] // 2 - 1
        request, counts = table[:, -2:].unbind(dim=1)
        yield Batch(table[:, :wide], table[:, wide:-2], counts, slots[request, : padded(tiles[0].keys)])


def table_of(tiles: Sequence[Tile], place: Mapping[int, int], causal: bool, padding: int) -> torch.Tensor:
    """int64 [tiles, 2 * queries + 2]: the rows of a batch, the keys that each sees, the place of the request, and the
    keys of the tile."""
    of_tiles = [[place[t.request], t.keys, t.first, t.end, t.keys - t.end + 1] for t in tiles]
    request, counts, first, end, shift = torch.tensor(of_tiles).T.unsqueeze(2)
    rows = first + torch.arange(max(tile.queries for tile in tiles))
    visible = (shift + rows if causal else counts.expand_as(rows)).clamp_min(0).masked_fill_(rows >= end, 0)
    return torch.cat([rows.masked_fill_(visible == 0, padding), visible, request, counts], dim=1)


def padded(keys: int) -> int:
    return keys if keys <= UNPADDED else -(-keys // WHOLE) * WHOLE


def slots_of(memory: Memory, requests: torch.Tensor) -> torch.Tensor:
    """The slots of the tokens of requests, given by number and length [requests, 2], up to the longest of all requests;
    after its last token, the slot of that token again."""
    position = torch.arange(padded(max(memory.lengths)), device=requests.device).minimum(requests[:, 1:] - 1)
    return memory.slots(requests[:, :1], position)


#: (weights p [tiles * heads, rows, n], values [tiles * heads, n, value_dim], keys of each tile [tiles]) -> bounds on
#: the sum of |partial outputs| and on that of their squares. Both are sums over the chunks of keys that a kernel can
#: make, [tiles * heads, rows, value_dim].
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
    of `expected`."""
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
    return expected(*sums.by_name(len(q)))


@dataclass(frozen=True)
class Sums:
    """Sums over the keys of each row; the row after the last query is for padding.

    Attributes:
        heads: query heads by the key-value head that they share, int64 [key-value heads, heads of a group].
        elements: the sums of `ELEMENTS`, [sums, queries + 1, heads, value_dim], float64.
        rows: the sums of `ROWS`, [sums, queries + 1, heads], float64.
        more: names of sums after those, of elements and of rows.
    """

    heads: torch.Tensor
    elements: torch.Tensor
    rows: torch.Tensor
    more: tuple[str, ...] = ()

    @classmethod
    def of(cls, q: torch.Tensor, memory: Memory, capped: bool) -> Sums:
        kv_heads, value_dim = memory.values.shape[1:]
        more = (CAPPED,) if capped else ()
        shape = (len(q) + 1, q.shape[1])
        elements = q.new_zeros(len((*ELEMENTS, *more)), *shape, value_dim, dtype=torch.float64)
        by_row = q.new_zeros(len((*ROWS, *more)), *shape, dtype=torch.float64)
        by_row[ROWS.index("top")] = -torch.inf
        return cls(heads_of(q.shape[1], kv_heads, q.device), elements, by_row, more)

    def by_name(self, count: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The sums of the first `count` rows: elements [count, heads, value_dim], rows [count, heads]."""
        return (
            dict(zip((*ELEMENTS, *self.more), self.elements[:, :count].unbind(), strict=True)),
            dict(zip((*ROWS, *self.more), self.rows[:, :count].unbind(), strict=True)),
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
        found = torch.stack([elements[name] for name in (*ELEMENTS, *self.more)])
        self.elements[:, index[0], index[1]] = found.view(len(found), *shape, -1)
        found = torch.stack([by_row[name] for name in (*ROWS, *self.more)])
        self.rows[:, index[0], index[1]] = found.view(len(found), *shape)


@functools.lru_cache(maxsize=256)
def heads_of(count: int, kv_heads: int, device: torch.device) -> torch.Tensor:
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
    """The sums of `ELEMENTS` [tiles * key-value heads, rows, value_dim], and those of `ROWS` but the length.

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
        FLUSHED: p.masked_fill(p >= SMALLEST, 0.0).sum(dim=2) * magnitudes.amax(dim=(1, 2)).unsqueeze(1),
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
        elements[CAPPED], by_row[CAPPED] = capped.bmm(magnitudes), capped.sum(dim=2)
    return elements, by_row


def partial_outputs(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, page_size: int = 1) -> torch.Tensor:
    """A bound on the sum of |partial outputs| over the chunks into which the keys may be split: see `Split`. A chunk is
    whole pieces, which add up to at most the sum of |pieces|, and parts of two others, each at most its sum of p |v|; n
    keys have fewer than n / SMALLEST_CHUNK cuts. Pages of PIECE or more tokens are pieces, which no end cuts. Keys that
    fit in one chunk are not split."""
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
