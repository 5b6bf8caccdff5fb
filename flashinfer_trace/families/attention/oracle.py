"""The float64 oracle of attention over given keys and values, and the quantities from which bounds are computed.

Query heads are sorted by the key-value head h // (num_qo_heads / num_kv_heads) that they share, and weights are
normalised by the log-sum-exp before the product with the values. The references instead reshape heads into groups and
divide after that product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention.rounding import FLOAT32, LOG2_E
from flashinfer_trace.families.attention.tiles import Batch, Memory, Sizes, batches
from flashinfer_trace.harness.compare import CONFIDENCE, Expected, summation_error

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

#: float64 parts per element of the output, and per row; `expected_outputs` explains them.
ELEMENT_PARTS = ("weighted", "logit", "weights", "partial")
ROW_PARTS = ("lse", "length", "lse_logit", "others", "squared_others")
#: Sums over rows, from which the gain of an output is bounded: how far one rounding of the weights, of the partial
#: outputs or of the output can move it. settled: in rows with a dominating key; worst: in all other rows; squares: the
#: squares in those other rows.
ROUNDED = ("weights", "partial", "output")
GAIN_PARTS = (
    *("size", "logit", "keys"),
    *(f"{kind}_{rounded}" for kind in ("settled", "worst", "squares") for rounded in ROUNDED),
)
#: A row that gives more than this weight to one key rounds like a multiple of that key: see `gains`.
SETTLED = 0.9


def any_chunks(page_size: int = 1) -> Split:
    """For kernels that split keys into chunks of any length from SMALLEST_CHUNK on, in whole pages."""

    def split(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        absolute = partial_outputs(p, values, counts, page_size)
        return absolute, absolute.square()

    return split


def expected_outputs(
    q: torch.Tensor, memory: Memory, sm_scale: float, causal: bool, split: Split
) -> dict[str, Expected]:
    """Expected output [queries, heads, value_dim] and lse [queries, heads]; queries align with the end of the keys.

    `split` describes how kernels may split the keys.

    Parts of both, where p are the exact weights, v the values and o the output:

    - ``weighted``: sum p |v|; ``length``: visible keys; ``lse``: the exact lse (0 for rows without keys),
    - ``lse_logit``: sqrt(sum p^2 e^2), the effect of float32 errors e of the logits on the natural lse; ``logit``: the
      effect on an output, sqrt(sum p^2 e^2 v^2) + |o| ``lse_logit``, which bounds sqrt(sum p^2 e^2 (v - o)^2),
    - ``weights``: the effect on sum p v of relative errors of at most 1, independent from key to key, in all weights
      but the largest: the smaller of sum p |v| and 8 sqrt(sum p^2 v^2); ``others`` and ``squared_others``: sum p and
      sum p^2 over the same keys. In kernels that subtract the maximum, the largest weight is exp(0) = 1, never rounded,
    - ``partial``: a bound on the sum of |partial outputs|, however a kernel splits the keys,
    - ``gain_*``: the same, projected on the output and summed over it (see `policies.gain_limit`).
    """
    rows = len(q)
    totals = Totals.of(q, memory)
    heads = totals.heads
    sizes = Sizes(heads.numel(), len(heads), q.shape[2], memory.values.shape[2], PIECE)
    for batch in batches(memory, sizes, causal, rows):
        # What is computed for padding is written to a row of its own: any query may stand for it.
        queries = by_kv_head(q[batch.rows.clamp_max(rows - 1)], heads)
        keys, values = (
            each[batch.slots].transpose(1, 2).contiguous().double() for each in (memory.keys, memory.values)
        )
        hidden = batch.hidden.repeat(1, heads.shape[1], 1).unsqueeze(1)
        totals.add(batch, attention(queries.double(), keys, values, hidden, sm_scale, batch.counts, split))
    parts = {name: part[:rows] for name, part in totals.parts.items()}
    value, lse = parts.pop("value"), parts["lse"].squeeze(-1)
    parts["lse"] = torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1)
    gain = {f"gain_{name}": total for name, total in zip(GAIN_PARTS, totals.gain, strict=True)}
    return {
        "output": Expected(value, {**parts, **gain}),
        "lse": Expected(lse, {name: parts[name].squeeze(-1) for name in ROW_PARTS}),
    }


def by_kv_head(queries: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """[tiles, queries, heads, dim] -> [tiles, key-value heads, rows, dim]: rows are heads of a group, then queries."""
    return queries[:, :, heads].permute(0, 2, 3, 1, 4).flatten(2, 3)


@dataclass(frozen=True)
class Totals:
    """The parts of all queries, and one row more for padding: see `expected_outputs`.

    Attributes:
        heads: query heads by the key-value head that they share, int64 [key-value heads, heads of a group].
        parts: with ``value``, [queries + 1, heads, value_dim or 1], float64.
        gain: the sums of GAIN_PARTS.
    """

    heads: torch.Tensor
    parts: dict[str, torch.Tensor]
    gain: torch.Tensor

    @classmethod
    def of(cls, q: torch.Tensor, memory: Memory) -> Totals:
        """The parts of queries that see no key."""
        rows, count = q.shape[:2]
        kv_heads, value_dim = memory.values.shape[1:]
        heads = (torch.arange(count, device=q.device) // (count // kv_heads)).argsort(stable=True).view(kv_heads, -1)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=q.device)

        parts = {name: zeros(rows + 1, count, value_dim) for name in ("value", *ELEMENT_PARTS)}
        parts |= {name: zeros(rows + 1, count, 1) for name in ROW_PARTS}
        parts["lse"] -= math.inf
        return cls(heads, parts, zeros(len(GAIN_PARTS)))

    def add(self, batch: Batch, block: dict[str, torch.Tensor]) -> None:
        """Writes the parts that `attention` computed of a batch."""
        kv_heads, group = self.heads.shape
        tiles, queries = batch.rows.shape
        index = batch.rows.flatten().unsqueeze(1), self.heads.flatten()
        for name in self.parts.keys() & block.keys():
            by_row = block[name].view(tiles, kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4)
            self.parts[name].index_put_(index, by_row.flatten(2, 3).flatten(0, 1))
        self.parts["length"][batch.rows.flatten()] = (batch.last.flatten() + 1).clamp_min(0).double().view(-1, 1, 1)
        self.gain.add_(torch.stack([block[f"gain_{name}"] for name in GAIN_PARTS]))


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    sm_scale: float,
    counts: torch.Tensor,
    split: Split,
) -> dict[str, torch.Tensor]:
    """Tiles of queries [tiles, heads, rows, dim] on keys and values [tiles, heads, n, ...]: parts like the queries.

    Args:
        hidden: which keys a row does not see, bool [tiles, 1, rows, n]; padding is never seen.
        counts: keys of each tile without padding [tiles].
    """
    raw = queries @ keys.mT
    logits = (raw * float(sm_scale)).masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    p = torch.exp(logits - torch.where(lse.isfinite(), lse, 0.0))
    value = p @ values
    # Errors of the sum of products, the scale, its product with log2(e), and the subtraction of the maximum.
    terms = summation_error(queries.abs() @ keys.abs().mT, keys.shape[-1])
    errors = float(sm_scale) * terms + 4 * FLOAT32 * raw.abs() * float(sm_scale)
    largest = p == p.amax(dim=-1, keepdim=True)
    rest = p.masked_fill(largest, 0.0)
    p_error = p * errors
    squares_of_values = values.square()
    lse_logit = p_error.square().sum(dim=-1, keepdim=True).sqrt()
    rest_weighted = (rest @ values.abs()).minimum(CONFIDENCE * (rest.square() @ squares_of_values).sqrt())
    partial, partial_squares = split(p, values, counts)
    return {
        "value": value,
        "lse": lse * LOG2_E,
        "weighted": p @ values.abs(),
        "logit": (p_error.square() @ squares_of_values).sqrt() + value.abs() * lse_logit,
        "lse_logit": lse_logit,
        "weights": rest_weighted,
        "others": rest.sum(dim=-1, keepdim=True),
        "squared_others": rest.square().sum(dim=-1, keepdim=True),
        "partial": partial,
        **gains(value, values, p, p_error, rest, partial, partial_squares),
    }


def gains(
    value: torch.Tensor,
    values: torch.Tensor,
    p: torch.Tensor,
    p_error: torch.Tensor,
    rest: torch.Tensor,
    partial: torch.Tensor,
    partial_squares: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The GAIN_PARTS: the errors of each row projected on its output, and summed over all rows.

    Each key's error moves the output towards that key, or, where the denominator has the same error, towards it and
    away from the output.

    Args:
        value: the outputs [tiles, heads, rows, value_dim].
        p, p_error, rest: weights, their errors, and the weights without the largest, all [tiles, heads, rows, n].
        partial, partial_squares: what `Split` gives.
    """
    row_size = value.square().sum(dim=-1, keepdim=True)
    lse_logit = p_error.square().sum(dim=-1, keepdim=True).sqrt()
    along = value @ values.mT
    moves = rest * along.abs().maximum((along - row_size).abs())
    worst = {"weights": moves.sum(dim=-1), "partial": (partial * value.abs()).sum(dim=-1), "output": row_size[..., 0]}
    squares = {
        "weights": moves.square(),
        "partial": partial_squares * value.square(),
        "output": value.square().square(),
    }
    # Where one key has nearly all the weight, all elements are a little less than its bf16 values and round to them:
    # the errors have one sign. Elsewhere roundings are independent from element to element and from key to key.
    settled = p.amax(dim=-1) > SETTLED
    return {
        "gain_size": row_size.sum(),
        "gain_logit": ((p_error * along).square().sum() + (row_size * lse_logit).square().sum()) * 2,
        "gain_keys": (p * along).abs().sum() + row_size.sum(),
        **{f"gain_settled_{name}": torch.where(settled, worst[name], 0.0).sum() for name in ROUNDED},
        **{f"gain_worst_{name}": torch.where(settled, 0.0, worst[name]).sum() for name in ROUNDED},
        **{f"gain_squares_{name}": torch.where(settled, 0.0, squares[name].sum(dim=-1)).sum() for name in ROUNDED},
    }


def partial_outputs(p: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, page_size: int = 1) -> torch.Tensor:
    """A bound on the sum of |partial outputs| over the chunks into which the keys may be split: see `Split`.

    A chunk consists of whole pieces and of what its ends cut off two others. The whole pieces add up to at most the sum
    of |pieces|, and the cut parts of one piece to at most its sum of p |v|; n keys have fewer than n / SMALLEST_CHUNK
    cuts. Pages of PIECE or more tokens are pieces themselves, and no end cuts them. Keys that fit in one chunk are not
    split, so their bound is zero. The bound is at most sum p |v|.
    """
    most = values.shape[2]
    if most <= SMALLEST_CHUNK:
        return torch.zeros_like(p[..., :1] * values[:, :, :1])
    weights, by_piece = in_pieces(p, values, max(PIECE, page_size))
    cuts = ((counts - 1) // SMALLEST_CHUNK).view(-1, 1, 1, 1)
    whole: torch.Tensor = (weights @ by_piece).abs().sum(dim=2)
    if page_size >= PIECE:
        return torch.where(cuts > 0, whole, 0.0)
    absolute = weights @ by_piece.abs()
    largest = absolute.topk((most - 1) // SMALLEST_CHUNK, dim=2).values
    number = torch.arange(largest.shape[2], device=p.device).view(-1, 1, 1)
    cut = torch.where(number < cuts.unsqueeze(4), largest, 0.0).sum(dim=2)
    return torch.where(cuts > 0, (whole + cut).minimum(absolute.sum(dim=2)), 0.0)


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
