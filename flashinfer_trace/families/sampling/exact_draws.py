"""The sampling references use a uniform number exactly as they say: it is put at the edges of each token's interval."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from flashinfer_trace.families.sampling.inputs import make_inputs
from flashinfer_trace.families.sampling.oracles import decide
from flashinfer_trace.families.sampling.rows import NO_TOP_K, draws_again
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, ReferenceRun
from flashinfer_trace.harness.inputs import Draws

#: How far from an edge the uniform numbers are: far above float64's roundings, far below float32's.
BESIDE = 2.0**-40
LARGEST = 1.0 - 2.0**-53

#: Edges that are looked at in each row, evenly spaced and the last one: those of a whole vocabulary would take minutes.
EDGES = 40

#: Rows of one batch, by size of the vocabulary: fewer than any of their tokens that are kept; and one row of thousands
#: of tokens, of which a single draw shows little but to a test that knows the number drawn. None: the Definition's own.
BATCHES: Mapping[int | None, int] = {None: 3, 4099: 1}

#: Rows and parameters, each without a token whose support a rounding could change.
CASES: tuple[dict[str, Any], ...] = (
    {"row": "short", "sum": 1.0, "top_k": 6, "top_p": 0.7, "min_p": 0.5},
    {"row": "normal", "sum": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"row": "normal", "sum": 1.0, "top_k": NO_TOP_K, "top_p": 1.5, "min_p": 0.0},
    {"row": "normal", "sum": 1.0, "top_k": 2000, "top_p": 1.5, "min_p": 0.0},
    {"row": "dyadic", "sum": 1.0, "top_k": -1, "top_p": 1.5, "min_p": 0.0},
    {"row": "trailing", "sum": 1.0, "top_k": NO_TOP_K, "top_p": 1.5, "min_p": 0.0},
    {"row": "trailing", "sum": 0.5, "top_k": 6, "top_p": 0.3, "min_p": 0.5},
    {"row": "short", "sum": 2.0, "top_k": 4, "top_p": 0.9, "min_p": 0.0},
    {"row": "one_hot", "sum": 1.0, "top_k": 1, "top_p": 0.5, "min_p": 1.0},
    {"row": "zero", "sum": 1.0, "top_k": NO_TOP_K, "top_p": 1.5, "min_p": 0.5},
)


def wrong_draws(definition: Definition, run: ReferenceRun) -> list[str]:
    """One line for each row of which the reference, given a uniform number, returns another token than it must.

    The token is the first, in order of index, whose cumulative mass exceeds u: of all positive tokens, u in [0, 1), in
    a sampler that rejects, and where that one is not kept, and in the others, of the kept ones, u in [0, kept mass).
    """
    lines = []
    for vocab_size, batch in BATCHES.items():
        sized = definition if vocab_size is None else definition.with_const_axes({"vocab_size": vocab_size})
        lines += wrong_draws_of(sized, batch, run)
    return lines


def wrong_draws_of(definition: Definition, batch: int, run: ReferenceRun) -> list[str]:
    """As `wrong_draws`, with so many rows at a time."""
    lines = []
    for number, case in enumerate(CASES):
        spec = {name: value for name, value in case.items() if name in ("row", "sum") or name in definition.inputs}
        inputs = make_inputs(definition, {"rows": 1, "draws": 1, "specs": [spec]}, Draws(number, "cpu"))
        edges = list(uniform_numbers(definition, inputs, case["row"] == "dyadic"))
        wanted = [token for _, token in edges]
        uniform = torch.tensor([u for u, _ in edges], dtype=torch.float64)
        got = [token for few in torch.split(uniform, batch) for token in tokens_for(definition, inputs, few, run)]
        wrong = [i for i, token in enumerate(wanted) if i >= len(got) or got[i] != token]
        rows_of = f"{batch} rows of {definition.const_axes['vocab_size']} tokens"
        if wrong or len(got) != len(wanted):
            first = wrong[0] if wrong else 0
            found = got[first] if first < len(got) else "nothing"
            lines.append(
                f"reference: {spec}, seed {number}, {rows_of}: for u = {edges[first][0]!r} it draws {found} instead of "
                f"{wanted[first]} ({len(wrong)} of {len(edges)} numbers at the edges of intervals)"
            )
    return lines


def uniform_numbers(definition: Definition, inputs: Inputs, exact: bool) -> Iterator[tuple[float, int]]:
    """Uniform numbers and the token that each must give; with `exact`, sums are exact and the edges themselves too."""
    probs = inputs["probs"][0].double()
    keep = ((decide(definition, inputs).margin[0] > 0) & (probs > 0)).tolist()
    nothing = len(keep) - 1 if "min_p" in inputs and not probs.any() else 0
    rejects = draws_again(definition)
    kept = cumulative([float(p) if k else 0.0 for p, k in zip(probs, keep, strict=True)])
    whole = cumulative(probs.tolist())

    def token(u: float) -> int:
        if not kept[-1]:
            return nothing
        if rejects:
            first = min(bisect.bisect_right(whole, u), last_increase(whole))
            if keep[first]:
                return first
        return min(bisect.bisect_right(kept, u * kept[-1]), last_increase(kept))

    numbers = {0.0, LARGEST}
    for mass, total in ((kept, kept[-1]), (whole, 1.0)) if rejects else ((kept, kept[-1]),):
        distinct = sorted(set(mass)) if total else []
        for edge in [*distinct[:: -(-len(distinct) // EDGES) or 1], *distinct[-1:]]:
            numbers |= {edge / total - BESIDE, edge / total + BESIDE} | ({edge / total} if exact else set())
    return ((u, token(u)) for u in sorted(numbers) if 0 <= u < 1)


def cumulative(values: list[float]) -> list[float]:
    """Sums of the first one, two, ... values in float64."""
    return torch.tensor(values, dtype=torch.float64).cumsum(0).tolist()


def last_increase(sums: list[float]) -> int:
    """The first index with the final sum: the last token that has any mass."""
    return sums.index(sums[-1])


def tokens_for(definition: Definition, inputs: Inputs, uniform: torch.Tensor, run: ReferenceRun) -> list[int]:
    """What the reference draws from the one row of `inputs` for each of these numbers, in every draw that it makes."""
    repeated = {name: value.repeat_interleave(len(uniform), dim=0) for name, value in inputs.items()}
    (samples,) = run(definition, repeated, uniform).values()
    return [int(token) for token in samples.reshape(-1)]
