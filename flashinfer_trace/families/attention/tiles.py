"""How requests of uneven lengths are computed together: tiles of queries and the keys that they see, in padded batches.

A GPU takes as long to be told what to do as to do it with a few million numbers: requests that differ little are padded
to one size. The padding sees no key, or is a key that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

#: Elements of the largest temporary.
BLOCK_ELEMENTS = 2**26
#: So many more elements take as long as one batch more does, by kind of device.
BATCH_ELEMENTS = {"cpu": 2**13, "cuda": 2**22}
#: More keys than UNPADDED, which may be split, are padded to a multiple of WHOLE, so that pieces of them need no copy.
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
    """What one query and one key of a request take: elements of the largest temporaries."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    piece: int

    def of(self, queries: int, keys: int) -> int:
        """Elements of queries and the keys that they see."""
        return queries * self.of_query(keys) + self.kv_heads * keys * (self.key_dim + self.value_dim)

    def of_query(self, keys: int) -> int:
        """Elements of one query and the keys that it sees."""
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
        rows: the query of each row, int64 [tiles, queries]; one that is no query where a row is padding or sees no key.
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
    """How many keys are computed for so many."""
    return keys if keys <= UNPADDED else -(-keys // WHOLE) * WHOLE


def slots_of(memory: Memory, requests: torch.Tensor) -> torch.Tensor:
    """The slots of the tokens of requests, given by number and length [requests, 2], up to the longest of all requests;
    after its last token, the slot of that token again."""
    position = torch.arange(padded(max(memory.lengths)), device=requests.device).minimum(requests[:, 1:] - 1)
    return memory.slots(requests[:, :1], position)
