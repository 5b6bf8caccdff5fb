"""Inputs of the sampling families: all rows of one kind are drawn at once, and nothing is read back from a GPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from flashinfer_trace.families.sampling.rows import (
    BESIDE,
    NEAR,
    SMALLEST_SUM,
    THRESHOLD_LARGEST,
    THRESHOLD_P,
    UNIT,
    is_joint,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs, Plan
from flashinfer_trace.harness.inputs import Draws

#: A named p is at the cumulative mass of one of this many of the largest tokens, or at the ratio of one to the largest.
LARGEST = 40
#: Tokens of a ``short`` row.
SHORT = 10
#: Numbers of the host are multiples of 2^-24.
BITS = 24
#: Values of a ``few_valued`` row, before it is divided by its sum.
LEVELS = (0.0, 1.0, 2.0, 5.0, 11.0)
#: Shares of the largest tokens of a ``dyadic`` row in what the others leave, as negative powers of 2; one more token
#: gets the rest.
SHARES = (1, 2, 3, 4)


def make_inputs(definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    specs = [plan["specs"][row % len(plan["specs"])] for row in range(plan["rows"])]
    scaled = unscaled = rows_of_kinds([spec["row"] for spec in specs], definition.const_axes["vocab_size"], draws)
    sums = [spec["sum"] for spec in specs]
    if any(total != 1.0 for total in sums):
        scaled = unscaled * torch.tensor(sums, device=draws.device).unsqueeze(-1)
    # p is absolute mass where rows are sampled from by top-p alone, elsewhere a share of the row's sum.
    share = "renorm_probs" in definition.outputs or ("top_k" in definition.inputs and not is_joint(definition))
    inputs: Inputs = {"probs": scaled}
    for name in definition.inputs:
        if name != "probs":
            inputs[name] = parameter(name, [spec[name] for spec in specs], unscaled if share else scaled, draws)
    count = plan["draws"]
    # Each row `count` times in succession.
    return inputs if count == 1 else {name: value.repeat_interleave(count, dim=0) for name, value in inputs.items()}


def parameter(name: str, values: Sequence[float | str], rows: torch.Tensor, draws: Draws) -> torch.Tensor:
    """One parameter of each row, [rows]: top_k as int32, others as float32; names stand for limits of the row."""
    if name == "top_k":
        return torch.tensor(values, dtype=torch.int32, device=draws.device)
    given = [math.nan if isinstance(value, str) else value for value in values]
    numbers = torch.tensor(given, dtype=torch.float32, device=draws.device)
    if not any(isinstance(value, str) for value in values):
        return numbers
    named = limits(name, values, rows, draws)
    return torch.where(numbers.isnan(), named, numbers)


def limits(name: str, where: Sequence[float | str], rows: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The p at the value that decides on one token of each row, or at a known distance from it: see BESIDE and NEAR.
    For top-p that is the mass of a random number of the largest tokens, rounded to float32, which is exact for a dyadic
    row. For min-p it is the ratio of a token to the largest one."""
    places = [number / (1 << BITS) for number in draws.host_integers(len(where), 0, (1 << BITS) - 1)]
    known = [places, [NEAR.get(each, 1.0) for each in where], [float(BESIDE.get(each, 0)) for each in where]]
    place, factor, direction = torch.tensor(known, dtype=torch.float64, device=draws.device)
    largest = torch.topk(rows, min(LARGEST, rows.shape[1])).values
    positive = (largest > 0).sum(dim=-1)
    if name == "min_p":
        token = 1 + (place * (positive - 1)).long()
        found = largest.gather(1, token.unsqueeze(-1)).squeeze(-1) / largest[:, 0]
    else:
        # In a row of few tokens, not the last one: its mass is the whole row's.
        count = (positive - (positive < largest.shape[1]).long()).clamp_min(1)
        masses = largest.cumsum(dim=-1, dtype=torch.float64)
        found = masses.gather(1, (place * count).long().unsqueeze(-1)).squeeze(-1).float()
    found = (found.double() * factor).float()
    return torch.nextafter(found, found + direction.float())


def rows_of_kinds(kinds: Sequence[str], vocab_size: int, draws: Draws) -> torch.Tensor:
    numbers: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        numbers.setdefault(kind, []).append(number)
    parts = [make_rows(kind, len(rows), vocab_size, draws) for kind, rows in numbers.items()]
    if len(parts) < 2:
        return parts[0] if parts else torch.zeros(0, vocab_size, device=draws.device)
    made = torch.cat(parts)
    order = [number for rows in numbers.values() for number in rows]
    if order == sorted(order):
        return made
    place = [order.index(number) for number in range(len(order))]
    return made[torch.tensor(place, device=draws.device)]


def make_rows(kind: str, count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    """Rows that sum to 1 (to 0 for ``zero``), float32 [count, vocab_size]; places do not depend on probabilities."""
    return _MAKERS[kind](count, vocab_size, draws)


def zero(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    return torch.zeros(count, vocab_size, device=draws.device)


def uniform(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    return torch.full((count, vocab_size), 1 / vocab_size, device=draws.device)


def one_hot(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    """Never token 0, which a sampler also returns if it finds nothing."""
    return zero(count, vocab_size, draws).scatter_(1, draws.integers((count, 1), 1, vocab_size - 1), 1.0)


def halved(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    rest = torch.full((count, vocab_size), 0.5 / (vocab_size - 1), device=draws.device)
    return rest.scatter_(1, draws.integers((count, 1), 0, vocab_size - 1), 0.5)


def normal(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    return torch.softmax(draws.normal((count, vocab_size), scale=2.5).double(), dim=-1).float()


def peaked(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    others = torch.softmax(draws.normal((count, vocab_size), scale=2.0).double(), dim=-1) * 0.4
    return others.scatter_(1, draws.integers((count, 1), 0, vocab_size - 1), 0.6, reduce="add").float()


def zipf(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    weights = torch.arange(1, vocab_size + 1, dtype=torch.float64, device=draws.device).pow(-1.1)
    order = draws.normal((count, vocab_size)).argsort(dim=-1)
    return (weights / weights.sum()).float()[order]


def few_valued(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    levels = torch.tensor(LEVELS, dtype=torch.float64, device=draws.device)
    weights = levels[draws.integers((count, vocab_size), 0, len(LEVELS) - 1)]
    return (weights / weights.sum(dim=-1, keepdim=True)).float()


def few_tokens(count: int, vocab_size: int, draws: Draws, last: bool = True) -> torch.Tensor:
    """SHORT tokens of distinct probabilities; the largest is in the last place if `last`, else nothing is there."""
    places = distinct(count, SHORT, vocab_size - 1, draws)
    numbers = iter(draws.host_integers(count * SHORT, 0, (1 << BITS) - 1))
    values = []
    for row in places:
        weights = [SHORT + level + 0.9 * next(numbers) / (1 << BITS) for level in range(SHORT)]
        values.append([weight / math.fsum(weights) for weight in weights])
        if last:
            row[-1] = vocab_size - 1
    return sparse(places, values, vocab_size, draws)


def smallest(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    places = distinct(count, 3, vocab_size, draws)
    return sparse(places, [float32_parts(SMALLEST_SUM)] * count, vocab_size, draws)


def threshold(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    largest = torch.tensor(THRESHOLD_LARGEST)
    kept = [float(largest), float(largest * THRESHOLD_P)]
    return sparse(distinct(count, 3, vocab_size, draws), [[*kept, 1 - sum(kept)]] * count, vocab_size, draws)


def sparse(places: list[list[int]], values: list[list[float]], vocab_size: int, draws: Draws) -> torch.Tensor:
    """Rows that have these values in these places, and zeros elsewhere."""
    where = torch.tensor(places, device=draws.device)
    return zero(len(places), vocab_size, draws).scatter_(1, where, torch.tensor(values, device=draws.device))


def distinct(count: int, width: int, limit: int, draws: Draws) -> list[list[int]]:
    """`width` different places below `limit`, for each of `count` rows."""
    drawn = draws.host_integers(count * 3 * width, 0, limit - 1)
    rows = [drawn[first : first + 3 * width] for first in range(0, len(drawn), 3 * width)]
    # Rows with too many equal ones are completed.
    return [list(dict.fromkeys([*row, *range(width)]))[:width] for row in rows]


def float32_parts(number: float) -> list[float]:
    """Three numbers of 24 bits or fewer that sum to a positive float64 number: it has 53 bits."""
    parts: list[float] = []
    for _ in range(3):
        mantissa, exponent = math.frexp(number - sum(parts))
        parts.append(math.ldexp(math.floor(mantissa * 2**24), exponent - 24))
    return parts


def dyadic(count: int, vocab_size: int, draws: Draws) -> torch.Tensor:
    """Multiples of UNIT that sum to exactly 1: six tied levels with about half the mass, five tokens with the rest."""
    step = max(int(1 / UNIT) // (8 * vocab_size), 1)
    units = draws.integers((count, vocab_size), 1, 6) * step
    rest = int(1 / UNIT) - units.sum(dim=-1, keepdim=True)
    shares = rest >> torch.tensor(SHARES, device=draws.device)
    added = torch.cat([shares, rest - shares.sum(dim=-1, keepdim=True)], dim=1)
    chosen = torch.tensor(distinct(count, len(SHARES) + 1, vocab_size, draws), device=draws.device)
    return units.scatter_add_(1, chosen, added).float() * UNIT


_MAKERS: dict[str, Callable[[int, int, Draws], torch.Tensor]] = {
    **{make.__name__: make for make in (normal, peaked, zipf, few_valued, dyadic, uniform, one_hot, zero, halved)},
    **{"smallest": smallest, "threshold": threshold, "short": few_tokens},
    "trailing": functools.partial(few_tokens, last=False),
}
