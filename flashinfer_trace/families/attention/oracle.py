"""The float64 oracle of attention over given keys and values, and the quantities from which bounds are computed.

Every query head h gets a copy of the key-value head h // (num_qo_heads / num_kv_heads) by index, and weights are
normalised by the log-sum-exp before the product with the values. The references instead reshape heads into groups and
divide after that product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from flashinfer_trace.families.attention.rounding import FLOAT32, LOG2_E
from flashinfer_trace.harness.compare import CONFIDENCE, Expected, summation_error

__all__ = ["Request", "Split", "any_chunks", "expected_outputs", "partial_outputs"]

#: (weights p [heads, q, n], values [heads or 1, n, value_dim]) -> bounds on the sum of |partial outputs| and on the sum
#: of their squares over the chunks into which a kernel may split the keys, both [heads, q, value_dim].
Split = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

#: flashinfer splits the keys of a request into chunks of at least this many tokens (scheduler.cuh: max(128 / page_size,
#: 1) pages), but otherwise of any number of pages. Bounds are therefore computed from pieces: each end of a chunk cuts
#: at most one piece, or none if a piece is a page.
SMALLEST_CHUNK = 128
PIECE = 16
#: Elements of the largest temporary tensor.
BLOCK_ELEMENTS = 2**26

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
#: A row that gives more than this weight to one key rounds like a multiple of that key: see `attention`.
SETTLED = 0.9


@dataclass(frozen=True)
class Request:
    """Keys [kv_len, num_kv_heads, head_dim] and values [kv_len, num_kv_heads, value_dim] that queries first to end - 1
    attend to."""

    first: int
    end: int
    keys: torch.Tensor
    values: torch.Tensor


def any_chunks(page_size: int = 1) -> Split:
    """For kernels that split keys into chunks of any length from SMALLEST_CHUNK on, in whole pages."""

    def split(p: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        absolute = partial_outputs(p, values, page_size)
        return absolute, absolute.square()

    return split


def expected_outputs(
    q: torch.Tensor, requests: Iterable[Request], value_dim: int, sm_scale: float, causal: bool, split: Split
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
    rows, heads, _ = q.shape
    device = q.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    value, lse = zeros(rows, heads, value_dim), zeros(rows, heads) - math.inf
    parts = {name: zeros(rows, heads, value_dim) for name in ELEMENT_PARTS}
    parts |= {name: zeros(rows, heads, 1) for name in ROW_PARTS}
    gain = {name: zeros() for name in GAIN_PARTS}
    for request in requests:
        kv_len, kv_heads = request.keys.shape[:2]
        if kv_len == 0:
            continue
        shared = torch.arange(heads, device=device) // (heads // kv_heads)
        keys, values = (x.double().transpose(0, 1) for x in (request.keys, request.values))
        if kv_heads > 1:  # A single head is broadcast: 128 copies would not fit.
            keys, values = keys[shared], values[shared]
        position = torch.arange(kv_len, device=device)
        step = max(1, BLOCK_ELEMENTS // (heads * max(kv_len * value_dim // PIECE, kv_len, value_dim)))
        for start in range(request.first, request.end, step):
            stop = min(start + step, request.end)
            last = kv_len - request.end + torch.arange(start, stop, device=device)
            hidden = (position > last[:, None]) & causal
            visible = int(kv_len - hidden.sum(dim=1).min())
            if visible == 0:
                continue
            queries = q[start:stop].double().transpose(0, 1)
            seen = (keys[:, :visible], values[:, :visible], hidden[:, :visible])
            block = attention(queries, *seen, sm_scale, split)
            value[start:stop] = block["value"].transpose(0, 1)
            lse[start:stop] = block["lse"].squeeze(-1).T
            parts["length"][start:stop] = (visible - hidden[:, :visible].sum(dim=1)).view(-1, 1, 1)
            for name in parts.keys() & block.keys():
                parts[name][start:stop] = block[name].transpose(0, 1)
            for name in GAIN_PARTS:
                gain[name] += block[f"gain_{name}"]
    parts["lse"] = torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1)
    output = Expected(value, {**parts, **{f"gain_{name}": total for name, total in gain.items()}})
    return {"output": output, "lse": Expected(lse, {name: parts[name].squeeze(-1) for name in ROW_PARTS})}


def attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor,
    sm_scale: float,
    split: Split,
) -> dict[str, torch.Tensor]:
    """One block of queries [heads, q, dim] on keys and values [heads, n, ...]; hidden [q, n]. Parts [heads, q, ...].

    Keys and values of a single head are used for all query heads.
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
    partial, partial_squares = split(p, values)
    # The errors of a row are projected on its output. Each key's error moves the output towards that key, or, where the
    # denominator has the same error, towards it and away from the output.
    row_size = value.square().sum(dim=-1, keepdim=True)
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
        "value": value,
        "lse": lse * LOG2_E,
        "weighted": p @ values.abs(),
        "logit": (p_error.square() @ squares_of_values).sqrt() + value.abs() * lse_logit,
        "lse_logit": lse_logit,
        "weights": rest_weighted,
        "others": rest.sum(dim=-1, keepdim=True),
        "squared_others": rest.square().sum(dim=-1, keepdim=True),
        "partial": partial,
        "gain_size": row_size.sum(),
        "gain_logit": ((p_error * along).square().sum() + (row_size * lse_logit).square().sum()) * 2,
        "gain_keys": (p * along).abs().sum() + row_size.sum(),
        **{f"gain_settled_{name}": worst[name][settled].sum() for name in ROUNDED},
        **{f"gain_worst_{name}": worst[name][~settled].sum() for name in ROUNDED},
        **{f"gain_squares_{name}": squares[name].sum(dim=-1)[~settled].sum() for name in ROUNDED},
    }


def partial_outputs(p: torch.Tensor, values: torch.Tensor, page_size: int = 1) -> torch.Tensor:
    """A bound on the sum of |partial outputs| over the chunks into which the keys may be split: [heads, q, value_dim].

    A chunk consists of whole pieces and of what its ends cut off two others. The whole pieces add up to at most the sum
    of |pieces|, and the cut parts of one piece to at most its sum of p |v|; n keys have fewer than n / SMALLEST_CHUNK
    cuts. Pages of PIECE or more tokens are pieces themselves, and no end cuts them. Keys that fit in one chunk are not
    split, so their bound is zero. The bound is at most sum p |v|.
    """
    count = values.shape[1]
    if count <= SMALLEST_CHUNK:
        return torch.zeros_like(p[..., :1] * values[:, :1])
    piece = max(PIECE, page_size)
    pieces = math.ceil(count / piece)
    padding = pieces * piece - count
    weights = torch.nn.functional.pad(p, (0, padding)).view(*p.shape[:2], pieces, piece).transpose(1, 2)
    by_piece = torch.nn.functional.pad(values, (0, 0, 0, padding)).view(values.shape[0], pieces, piece, -1)
    whole: torch.Tensor = (weights @ by_piece).abs().sum(dim=1)
    if page_size >= PIECE:
        return whole
    absolute = weights @ by_piece.abs()
    cut = absolute.topk(math.ceil(count / SMALLEST_CHUNK) - 1, dim=1).values.sum(dim=1)
    return (whole + cut).minimum(absolute.sum(dim=1))
