"""What follows from an oracle's sums over the keys of each row: expected outputs, and the parts of their bounds."""

from __future__ import annotations

import torch

from flashinfer_trace.families.attention.rounding import LOG2_E
from flashinfer_trace.verdict.compare import CONFIDENCE, Expected

#: Sums over the keys of a row, per element of the output, where p are the weights, v the values, e the errors of the
#: logits, and *rest* the weights without the largest: sum p v, sum p |v|, sum p^2 e^2 v^2, sum rest |v|,
#: sum rest^2 v^2, and what `Split` gives.
ELEMENTS = ("value", "weighted", "squared_logit", "rest", "squared_rest", "partial", "squared_partial")
#: And per row, with o for the output: visible keys, the largest logit and the largest weight; sum p^2 e^2; sum rest and
#: sum rest^2; <o, o>; the root of sum (p e <v, o>)^2; sum p |<v, o>|; sum of the moves, rest times the larger of
#: |<v, o>| and |<v - o, o>|, and the root of the sum of their squares.
ROWS = (
    *("length", "top", "largest", "squared_lse_logit", "others", "squared_others"),
    *("size", "gain_logit", "gain_keys", "gain_moves", "norm_of_moves"),
)
#: Where logits c are capped: sum p |c| |v| per element, and sum p |c| per row.
CAPPED = "capped"
#: Sums over rows, from which the gain of an output is bounded: how far one rounding of the weights, of the partial
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
    - ``partial``: a bound on the sum of |partial outputs|, however a kernel splits the keys,
    - ``gain_*``: the same, projected on the output and summed over it (see `policies.gain_limit`),
    - ``capped``, only if the logits c are capped: sum p |c| |v| + |o| sum p |c| for an output, which bounds the sum of
      p |c| |v - o|, and sum p |c| for the lse.
    """
    # The largest weight is exp(top - lse); where there is no key, it is 0, and the lse -inf as the largest logit is.
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
    """The ``gain_*`` parts: the errors of each row projected on its output, and summed over all rows.

    Each key's error moves the output toward that key, or, where the denominator has the same error, toward it and
    away from the output. `size` are the absolute values of the output.
    """
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
