"""The float64 oracle of mla_paged, and what its bounds are made from.

It reads the cache token by token through flat slot numbers, takes one product over the concatenated key, and normalises
by a log-sum-exp before the product with the values; the reference gathers pages, adds two products and divides after.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.attention.rounding import FLOAT32, LOG2_E
from flashinfer_trace.harness.compare import CONFIDENCE, Expected, summation_error

#: Split-KV kernels cut the keys of a request at multiples of this (or of a multiple of it).
SMALLEST_CHUNK = 32
#: Elements of the largest temporary.
BLOCK_ELEMENTS = 2**26

#: Parts by element of output (o) or by row (r), summed or squared and summed over keys j; all float64.
ELEMENT_PARTS = ("weighted", "logit", "weights", "chunks")
ROW_PARTS = ("lse", "length", "lse_logit", "others", "squared_others")
#: Sums over all rows, from which the gain of an output is bounded.
GAIN_PARTS = ("size", "settled", "worst", "squares", "logit", "keys")
#: A row that gives more than this weight to one key rounds like a multiple of that key: see `attention`.
SETTLED = 0.9


def oracle(definition: Definition, inputs: dict[str, Any]) -> dict[str, Expected]:
    """Expected output and lse.

    Parts of both, with p the exact weights, v the values, o the output, x the logits in nats:

    - ``weighted``: sum p |v|; ``length``: visible keys; ``lse``: the exact lse (0 for rows without keys),
    - ``logit``: what float32 errors e_j of the logits do to an output, in quadrature: sqrt(sum p^2 e^2 (v - o)^2);
      ``lse_logit``: sqrt(sum p^2 e^2), what they do to the natural lse,
    - ``weights``: what relative errors of at most 1, independent from key to key, of all weights but the largest do to
      sum p v: the smaller of sum p |v| and 8 sqrt(sum p^2 v^2); ``others`` and ``squared_others``: sum p and sum p^2
      over the same keys. The largest weight is exp(0) = 1 in every kernel that subtracts the maximum: never rounded,
    - ``chunks``: the largest sum of |partial outputs| over the ways in which a kernel may split the keys,
    - ``gain_*``: the same, projected on the output and summed over it (see `policies.gain_limit`).
    """
    q_nope = inputs["q_nope"]
    device, (rows, heads, dim) = q_nope.device, q_nope.shape
    queries = torch.cat([q_nope, inputs["q_pe"]], dim=-1).double()
    cache = torch.cat([inputs["ckv_cache"], inputs["kpe_cache"]], dim=-1).flatten(0, 1)
    page_size = definition.const_axes["page_size"]
    kv_indptr = inputs["kv_indptr"].tolist()
    q_indptr = inputs["qo_indptr"].tolist() if "qo_indptr" in inputs else list(range(rows + 1))
    causal = "qo_indptr" in inputs
    last = inputs["kv_last_page_len"].tolist() if "kv_last_page_len" in inputs else [1] * (len(kv_indptr) - 1)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    value, lse = zeros(rows, heads, dim), zeros(rows, heads) - math.inf
    parts = {name: zeros(rows, heads, dim) for name in ELEMENT_PARTS}
    parts |= {name: zeros(rows, heads, 1) for name in ROW_PARTS}
    gain = {name: zeros() for name in GAIN_PARTS}
    for request in range(len(kv_indptr) - 1):
        first_page, end_page = kv_indptr[request], kv_indptr[request + 1]
        kv_len = (end_page - first_page - 1) * page_size + last[request] if end_page > first_page else 0
        position = torch.arange(kv_len, device=device)
        slots = inputs["kv_indices"][first_page + position // page_size].long() * page_size + position % page_size
        keys = cache[slots].double()
        step = max(1, BLOCK_ELEMENTS // (heads * max(kv_len, dim, 1)))
        for start in range(q_indptr[request], q_indptr[request + 1], step):
            stop = min(start + step, q_indptr[request + 1])
            limit = kv_len - q_indptr[request + 1] + torch.arange(start, stop, device=device)
            hidden = position > limit[:, None] if causal else torch.zeros_like(position > limit[:, None])
            visible = int(kv_len - hidden.sum(dim=1).min()) if kv_len else 0
            if visible == 0:
                continue
            block = attention(queries[start:stop], keys[:visible], dim, hidden[:, :visible], inputs["sm_scale"])
            value[start:stop], lse[start:stop] = block["value"], block["lse"].squeeze(-1)
            parts["length"][start:stop] = (visible - hidden[:, :visible].sum(dim=1)).view(-1, 1, 1)
            for name in parts.keys() & block.keys():
                parts[name][start:stop] = block[name]
            for name in GAIN_PARTS:
                gain[name] += block[f"gain_{name}"]
    parts["lse"] = torch.where(lse.isfinite(), lse, 0.0).unsqueeze(-1)
    output = Expected(value, {**parts, **{f"gain_{name}": total for name, total in gain.items()}})
    return {"output": output, "lse": Expected(lse, {name: parts[name].squeeze(-1) for name in ROW_PARTS})}


def attention(
    queries: torch.Tensor, keys: torch.Tensor, dim: int, hidden: torch.Tensor, sm_scale: float
) -> dict[str, torch.Tensor]:
    """One block of queries [q, heads, all] of a request on keys [n, all]; hidden [q, n]. See `oracle` for the parts."""
    values = keys[:, :dim]
    raw = queries @ keys.T
    logits = (raw * float(sm_scale)).masked_fill(hidden[:, None, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    p = torch.exp(logits - torch.where(lse.isfinite(), lse, 0.0))
    value = p @ values
    # A sum of products, the scale, its product with log2(e), and the subtraction of the maximum.
    terms = summation_error(queries.abs() @ keys.abs().T, keys.shape[1])
    errors = float(sm_scale) * terms + 4 * FLOAT32 * raw.abs() * float(sm_scale)
    largest = p == p.amax(dim=-1, keepdim=True)
    rest = p.masked_fill(largest, 0.0)
    p_error = p * errors
    squares_of_values = values.square()
    magnitude = p @ values.abs()
    lse_logit = p_error.square().sum(dim=-1, keepdim=True).sqrt()
    rest_weighted = (rest @ values.abs()).minimum(CONFIDENCE * (rest.square() @ squares_of_values).sqrt())
    chunk_sum, chunk_squares = partial_outputs(p, values)
    # The projection of a row's errors on its output. Each key's error moves the output towards that key, or, where the
    # denominator has the same error, towards it and away from the output.
    row_size = value.square().sum(dim=-1, keepdim=True)
    along = value @ values.T
    moves = rest * along.abs().maximum((along - row_size).abs())
    worst = row_size + moves.sum(dim=-1, keepdim=True) + (chunk_sum * value.abs()).sum(dim=-1, keepdim=True)
    squares = (value.square() * (value.square() + chunk_squares)).sum(dim=-1, keepdim=True)
    squares = squares + moves.square().sum(dim=-1, keepdim=True)
    # Where one key has nearly all the weight, all elements are a little less than its bf16 values and round to them:
    # errors of one sign. Elsewhere roundings are independent from element to element and from key to key.
    settled = p.amax(dim=-1, keepdim=True) > SETTLED
    return {
        "value": value,
        "lse": lse * LOG2_E,
        "weighted": magnitude,
        "logit": (p_error.square() @ squares_of_values).sqrt() + value.abs() * lse_logit,
        "lse_logit": lse_logit,
        "weights": rest_weighted,
        "others": rest.sum(dim=-1, keepdim=True),
        "squared_others": rest.square().sum(dim=-1, keepdim=True),
        "chunks": chunk_sum,
        "gain_size": row_size.sum(),
        "gain_settled": worst[settled].sum(),
        "gain_worst": worst[~settled].sum(),
        "gain_squares": squares[~settled].sum(),
        "gain_logit": ((p_error * along).square().sum() + (row_size * lse_logit).square().sum()) * 2,
        "gain_keys": (p * along).abs().sum() + row_size.sum(),
    }


def partial_outputs(p: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of |partial output| and of its square over chunks of keys, the largest over the lengths a chunk may have.

    flashinfer's MLAPlan splits the keys of a request into chunks of 32, 64, 128, 192 or a multiple of 256 tokens, by
    the load of the GPU; each partial output is stored in bf16. Keys that fit one chunk are not split: zero.
    """
    count = values.shape[0]
    absolute, squared = torch.zeros_like(p[..., :1] * values[0]), torch.zeros_like(p[..., :1] * values[0])
    if count <= SMALLEST_CHUNK:
        return absolute, squared
    limits = [limit for limit in (32, 64, 128, 192, *range(256, count, 256)) if limit < count]
    rows, pieces = p.flatten(0, 1), math.ceil(count / SMALLEST_CHUNK)
    padding = pieces * SMALLEST_CHUNK - count
    rows = torch.nn.functional.pad(rows, (0, padding)).view(-1, pieces, SMALLEST_CHUNK)
    by_piece = torch.nn.functional.pad(values, (0, 0, 0, padding)).view(pieces, SMALLEST_CHUNK, -1)
    step = max(1, BLOCK_ELEMENTS // (pieces * values.shape[1]))
    for start in range(0, rows.shape[0], step):
        pieces_out = rows[start : start + step].transpose(0, 1) @ by_piece
        out = slice(start, start + step)
        for limit in limits:
            sums = torch.stack([c.sum(dim=0) for c in torch.split(pieces_out, limit // SMALLEST_CHUNK)])
            flat_absolute, flat_squared = absolute.flatten(0, 1), squared.flatten(0, 1)
            flat_absolute[out] = flat_absolute[out].maximum(sums.abs().sum(dim=0))
            flat_squared[out] = flat_squared[out].maximum(sums.square().sum(dim=0))
    return absolute, squared
