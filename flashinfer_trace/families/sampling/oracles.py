"""The right outputs of sampling kernels, from the number and the mass of the tokens more probable than each one."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from flashinfer_trace.families.sampling.distribution import running_sums
from flashinfer_trace.families.sampling.rows import UNIT, draws_again, is_joint
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Inputs
from flashinfer_trace.verdict.compare import Expected

#: A row is not divided by a kept sum of at most this.
SMALLEST_SUM = 1e-8
#: Keeps quotients of rows without mass finite.
TINY = 1e-300


class Ranking(NamedTuple):
    """Places of the tokens in descending order of probability.

    Attributes:
        tokens: how many are strictly more probable than each one, int64 [rows, vocab_size].
        sums: mass of the 0, 1, 2, ... most probable ones, float64 [rows, vocab_size + 1].
        order: the tokens in this order, equal ones by index, int64 [rows, vocab_size].
    """

    tokens: torch.Tensor
    sums: torch.Tensor
    order: torch.Tensor

    @property
    def mass(self) -> torch.Tensor:
        """Mass of the tokens that are strictly more probable than each one."""
        return self.sums.gather(1, self.tokens)

    @property
    def before(self) -> torch.Tensor:
        """Mass of the tokens that come before each one, of those that are equal to it as well."""
        return torch.empty_like(self.tokens, dtype=torch.float64).scatter_(1, self.order, self.sums[:, :-1])


class Decision(NamedTuple):
    """Which tokens a sampler keeps: margins (see `signed_margin`), and the ranking where it was needed for them."""

    margin: torch.Tensor
    ranking: Ranking | None


def rank(probs: torch.Tensor) -> Ranking:
    """By one sort of the rows, and a search for each token in them."""
    falling = -probs
    ordered, order = falling.sort(dim=-1, stable=True)
    return Ranking(torch.searchsorted(ordered, falling), running_sums(-ordered), order)


def signed_margin(above: torch.Tensor, limit: torch.Tensor, exact: torch.Tensor | None = None) -> torch.Tensor:
    """(limit - above) / |limit|: positive for tokens with less than `limit` mass above them, which are the kept ones.

    Args:
        above: mass strictly above each token, float64 [rows, vocab_size].
        limit: [rows, 1]; where it is not positive nothing is kept.
        exact: [rows, 1], rows whose sums every order of summation represents exactly: their margins are infinite.
    """
    size = limit.abs()
    if exact is not None:
        size = size * ~exact
    # Where there is nothing to divide by, and no more mass above than the limit, the token is just not kept.
    return ((limit - above) / size).nan_to_num(-math.inf, math.inf, -math.inf)


def summed_exactly(probs: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Rows [rows, 1] whose float32 sums are exact in any order: multiples of UNIT / 2 that sum to at most 2. `total`
    [rows, 1] is the sum of each row."""
    units = probs * (2 / UNIT)
    return (units == units.round()).all(dim=-1, keepdim=True) & (total <= 2)


def power_of_two(total: torch.Tensor) -> torch.Tensor:
    return torch.frexp(total).mantissa == 0.5


def certainly(keep: torch.Tensor) -> torch.Tensor:
    """Margins of a decision that involves no rounding."""
    return (keep.double() - 0.5) * math.inf


def without(margin: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """The margins, where only the tokens `among` are left by another filter."""
    return margin.masked_fill(~among, -math.inf)


def top_k_keep(ranking: Ranking, top_k: torch.Tensor) -> torch.Tensor:
    """Fewer than k tokens above; a negative k is a huge unsigned one."""
    k = top_k.unsqueeze(-1)
    return (k < 0) | (ranking.tokens < k)


def top_p_margin(
    probs: torch.Tensor, ranking: Ranking, top_p: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Margins of top-p; p is a share of `total` [rows, 1], or absolute mass."""
    limit = top_p.double().unsqueeze(-1)
    exact = summed_exactly(probs, ranking.sums[:, -1:])
    if total is not None:
        limit, exact = limit * total, exact & power_of_two(total)
    return signed_margin(ranking.mass, limit, exact)


def min_p_margin(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Margins of min-p. At a threshold of 0 tokens of probability 0 are kept: rounding may let one be drawn, so they
    are undecidable."""
    threshold = (probs.amax(dim=-1, keepdim=True).double() * min_p.double().unsqueeze(-1)).float()
    margin = torch.zeros_like(probs, dtype=torch.float64)
    return margin.masked_fill_(probs > 0, math.inf).masked_fill_(probs < threshold, -math.inf)


def decide(definition: Definition, inputs: Inputs) -> Decision:
    """Margins of a sampling family's tokens, told apart by its parameters; only positive probabilities are drawn."""
    probs = inputs["probs"]
    if "min_p" in inputs:
        return Decision(min_p_margin(probs, inputs["min_p"]), None)
    ranking, among = rank(probs), probs > 0
    if "top_k" in inputs:
        among = among & top_k_keep(ranking, inputs["top_k"])
    if "top_p" not in inputs:
        return Decision(certainly(among), ranking)
    total = None
    if "top_k" in inputs and not is_joint(definition):
        total = (probs * among).sum(dim=-1, keepdim=True, dtype=torch.float64)
    return Decision(without(top_p_margin(probs, ranking, inputs["top_p"], total), among), ranking)


def first_draw(probs: torch.Tensor) -> torch.Tensor:
    """Chance of each token in a draw that is not scaled by the row's sum: its part of [0, 1), in order of index. Mass
    beyond 1 has no part; what is missing to 1 belongs to the last token of positive probability."""
    edges = running_sums(probs).clamp(max=1.0)
    index = torch.arange(probs.shape[-1], device=probs.device)
    last = ((probs > 0) * index).amax(dim=-1, keepdim=True)
    return edges.diff(dim=-1).scatter_add_(1, last, 1.0 - edges[:, -1:])


def chances(
    definition: Definition, inputs: Inputs, keep: torch.Tensor, mass: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chance of each token, and a bound where rounding lets a kernel keep it: its share of `mass` [rows, 1], that of
    the kept tokens, and with rejection its first draw from the whole row."""
    bound = inputs["probs"].double() / mass.clamp_min(TINY)
    value = bound * keep
    if draws_again(definition):
        first = first_draw(inputs["probs"])
        kept = first * keep
        value = kept + (1.0 - kept.sum(dim=-1, keepdim=True)) * value
        bound = bound + first
    return value, bound.clamp(max=1.0)


def runs(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of the run of equal rows that each row belongs to, int64 [batch_size], and the first row of each."""
    changed = torch.zeros(0, dtype=torch.bool)
    for value in inputs.values():
        differs = bits(value)[1:] != bits(value)[:-1]
        if differs.ndim > 1:
            differs = differs.any(dim=-1)
        changed = changed | differs if len(changed) else differs
    count = len(inputs["probs"])
    begins = torch.nn.functional.pad(changed, (1, 0), value=True)[:count]
    return begins.cumsum(0) - 1, begins.nonzero().flatten()


def bits(value: torch.Tensor) -> torch.Tensor:
    """The compared values: two float32 numbers at a time where rows have an even number of them."""
    return value.view(torch.int64) if value.ndim > 1 and value.shape[-1] % 2 == 0 else value


def sampling_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Probabilities [rows, vocab_size] of the distinct rows; successive equal rows are draws of one distribution."""
    group, first = runs({name: inputs[name] for name in definition.inputs})
    distinct = {name: inputs[name][first] for name in definition.inputs}
    probs = distinct["probs"]
    margin, ranking = decide(definition, distinct)
    keep = margin > 0
    mass = (probs * keep).sum(dim=-1, keepdim=True, dtype=torch.float64)
    value, chance = chances(definition, distinct, keep, mass)
    nothing = mass == 0
    parts = {"group": group, "margin": margin, "chance": chance}
    if ranking is not None:
        parts["before"] = ranking.before / mass.clamp_min(TINY)
        # Token 0 is drawn if no token can be.
        value[:, :1] += nothing
        margin[:, :1].masked_fill_(nothing, math.inf)
        return {"samples": Expected(value, parts)}
    # In min-p, where a row of zeros keeps all its tokens, it is the last one.
    token = (nothing & (probs.amax(dim=-1, keepdim=True) <= 0)) * (probs.shape[1] - 1)
    value.scatter_add_(1, token, nothing.double())
    margin.masked_fill_(nothing, -math.inf)
    margin.scatter_(1, token, margin.gather(1, token).masked_fill_(nothing, math.inf))
    return {"samples": Expected(value, parts)}


def renorm_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each kept probability over the sum of the kept ones, where that is above 1e-8. A smaller sum counts as 1e-8 in
    top-k renormalization, and as 1 in top-p renormalization."""
    probs = inputs["probs"]
    ranking = rank(probs)
    if "top_k" in inputs:
        margin = certainly(top_k_keep(ranking, inputs["top_k"]))
    else:
        margin = top_p_margin(probs, ranking, inputs["top_p"], ranking.sums[:, -1:])
        # The largest value is always kept: it is what p <= 0 leaves.
        margin.masked_fill_(ranking.tokens == 0, math.inf)
    exactly = probs.double()
    weight = exactly * (margin > 0)
    total = weight.sum(dim=-1, keepdim=True)
    scaled = total > SMALLEST_SUM
    divisor = total.where(scaled, SMALLEST_SUM if "top_k" in inputs else 1.0)
    parts = {"margin": margin, "probs": exactly, "scaled": scaled, "otherwise": divisor}
    return {"renorm_probs": Expected(weight / divisor, parts)}
