"""What sampling kernels must produce, from the distinct values of each row instead of its sorted elements."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.families.sampling.distribution import signed_margin
from flashinfer_trace.families.sampling.rows import UNIT, draws_again, is_joint
from flashinfer_trace.harness.compare import Expected
from flashinfer_trace.harness.family import Inputs

__all__ = ["renorm_oracle", "sampling_oracle"]


#: A kept sum of at most this is not what a row is divided by.
SMALLEST_SUM = 1e-8


class Ranking(NamedTuple):
    """Of each token, float64 [rows, vocab_size]: how many tokens are strictly more probable, and their mass."""

    tokens: torch.Tensor
    mass: torch.Tensor


def rank(probs: torch.Tensor) -> Ranking:
    """Counts and masses above, from each row's distinct values and how often they occur."""
    if not len(probs):
        return Ranking(probs.double(), probs.double())
    ordered, order = probs.sort(dim=-1)
    # The number of each token's value among the distinct values of its row, from the smallest on.
    steps = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).cumsum(dim=-1)
    level = torch.empty_like(order).scatter_(1, order, steps)
    nothing = torch.zeros_like(probs, dtype=torch.float64)
    multiplicity = nothing.scatter_add(1, level, torch.ones_like(nothing))
    values = nothing.scatter(1, level, probs.double())
    return Ranking(*(above_each(amounts).gather(1, level) for amounts in (multiplicity, values * multiplicity)))


def above_each(amounts: torch.Tensor) -> torch.Tensor:
    """Sums of what comes after each element of a row, float64."""
    after = amounts.flip(1).cumsum(1)
    return torch.nn.functional.pad(after[:, :-1], (1, 0)).flip(1)


def summed_exactly(probs: torch.Tensor) -> torch.Tensor:
    """Rows [rows, 1] whose float32 sums are exact in any order: multiples of UNIT / 2 that sum to at most 2."""
    units = probs.double() * (2 / UNIT)
    return ((units == units.round()).all(dim=-1) & (probs.double().sum(dim=-1) <= 2)).unsqueeze(-1)


def power_of_two(total: torch.Tensor) -> torch.Tensor:
    """Where dividing by `total`, or multiplying p by it, does not round."""
    return torch.frexp(total).mantissa == 0.5


def certainly(keep: torch.Tensor) -> torch.Tensor:
    """Margins of a decision that involves no rounding."""
    return torch.where(keep, torch.inf, -torch.inf).double()


def top_k_keep(ranking: Ranking, top_k: torch.Tensor) -> torch.Tensor:
    """Fewer than k tokens above; a negative k is a huge unsigned one."""
    k = top_k.double().unsqueeze(-1)
    return (k < 0) | (ranking.tokens < k)


def top_p_margin(
    probs: torch.Tensor, ranking: Ranking, top_p: torch.Tensor, among: torch.Tensor, absolute: bool
) -> torch.Tensor:
    """Margins of top-p among the tokens that passed a filter; p is absolute mass, or a share of what passed."""
    total = torch.where(among, probs.double(), 0.0).sum(dim=-1, keepdim=True)
    p = top_p.double().unsqueeze(-1)
    exact = summed_exactly(probs) & (power_of_two(total) | absolute)
    return torch.where(among, signed_margin(ranking.mass, p if absolute else p * total, exact), -torch.inf)


def support_margin(definition: Definition, inputs: Inputs) -> torch.Tensor:
    """Margins of a sampling family's tokens, told apart by its parameters; only positive probabilities are drawn."""
    probs = inputs["probs"]
    if "min_p" in inputs:
        largest = probs.double().amax(dim=-1, keepdim=True)
        threshold = (largest * inputs["min_p"].double().unsqueeze(-1)).float()
        # At a threshold of 0 tokens of probability 0 are kept: rounding may let one be drawn, so they are undecidable.
        drawable = torch.where(probs > 0, torch.inf, 0.0).double()
        return torch.where(probs >= threshold, drawable, -torch.inf)
    ranking, positive = rank(probs), probs > 0
    if "top_p" not in inputs:
        return certainly(top_k_keep(ranking, inputs["top_k"]) & positive)
    if "top_k" not in inputs:
        return top_p_margin(probs, ranking, inputs["top_p"], positive, absolute=True)
    among = top_k_keep(ranking, inputs["top_k"]) & positive
    if is_joint(definition):
        return torch.where(among, top_p_margin(probs, ranking, inputs["top_p"], positive, absolute=True), -torch.inf)
    return top_p_margin(probs, ranking, inputs["top_p"], among, absolute=False)


def first_draw(probs: torch.Tensor) -> torch.Tensor:
    """Chance of each token in a draw that is not scaled by the row's sum: its part of [0, 1), in order of index.

    Mass beyond 1 has no part; what is missing to 1 belongs to the last token of positive probability.
    """
    end = probs.double().cumsum(dim=-1).clamp(max=1.0)
    part = torch.diff(end, dim=-1, prepend=torch.zeros_like(end[:, :1]))
    index = torch.arange(probs.shape[-1], device=probs.device)
    last = torch.where(probs > 0, index, 0).amax(dim=-1, keepdim=True)
    return part.scatter_add(1, last, 1.0 - end[:, -1:])


def probabilities(definition: Definition, inputs: Inputs, keep: torch.Tensor) -> torch.Tensor:
    """Chance of each token: in proportion among the kept ones; rejection draws once from the whole row before."""
    probs = inputs["probs"]
    weight = torch.where(keep, probs.double(), 0.0)
    value = weight / weight.sum(dim=-1, keepdim=True).clamp_min(1e-300)
    if draws_again(definition):
        first = torch.where(keep, first_draw(probs), 0.0)
        value = first + (1.0 - first.sum(dim=-1, keepdim=True)) * value
    return value


def chance_if_kept(definition: Definition, inputs: Inputs, keep: torch.Tensor) -> torch.Tensor:
    """A bound of each token's chance where rounding lets a kernel keep it: its first draw, and its share of the kept.

    A token just behind the threshold has no part in `probabilities`, but may be as probable as the one before it.
    """
    probs: torch.Tensor = inputs["probs"].double()
    chance = probs / torch.where(keep, probs, 0.0).sum(dim=-1, keepdim=True).clamp_min(1e-300)
    if draws_again(definition):
        chance = chance + first_draw(inputs["probs"])
    return chance.clamp(max=1.0)


def sampling_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Probabilities [rows, vocab_size] of the distinct rows; successive equal rows are draws of one distribution."""
    values = [inputs[name].reshape(len(inputs["probs"]), -1) for name in definition.inputs]
    changes = torch.stack([(value[1:] != value[:-1]).any(dim=-1) for value in values]).any(dim=0)
    group = torch.nn.functional.pad(changes.long().cumsum(0), (1, 0))[: len(inputs["probs"])]
    first = torch.cat([changes.new_ones(1), changes]).nonzero().flatten()[: len(inputs["probs"])]
    distinct = {name: inputs[name][first] for name in definition.inputs}
    margin = support_margin(definition, distinct)
    keep = (margin > 0) & (distinct["probs"] > 0)
    value, chance = probabilities(definition, distinct, keep), chance_if_kept(definition, distinct, keep)
    nothing = (value.sum(dim=-1) == 0).nonzero().flatten()
    # What is drawn where nothing can be: token 0; in min-p, where a row of zeros keeps all its tokens, the last one.
    zeros = (distinct["probs"].amax(dim=-1) <= 0)[nothing]
    token = torch.where(zeros & ("min_p" in inputs), value.shape[-1] - 1, 0)
    value[nothing], margin[nothing] = 0.0, -torch.inf
    value[nothing, token], margin[nothing, token] = 1.0, torch.inf
    parts = {"group": group, "margin": margin, "chance": chance}
    return {"samples": Expected(value, parts)}


def renorm_oracle(definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """Each kept probability over the sum of the kept ones, where that is above 1e-8.

    A smaller sum counts as 1e-8 in top-k renormalisation, and as 1 in top-p renormalisation.
    """
    probs = inputs["probs"]
    ranking = rank(probs)
    if "top_k" in inputs:
        margin = certainly(top_k_keep(ranking, inputs["top_k"]))
    else:
        margin = top_p_margin(probs, ranking, inputs["top_p"], torch.ones_like(probs, dtype=torch.bool), absolute=False)
        # The largest value is always kept: it is what p <= 0 leaves.
        margin = torch.where(ranking.tokens == 0, torch.inf, margin)
    weight = torch.where(margin > 0, probs.double(), 0.0)
    total = weight.sum(dim=-1, keepdim=True)
    scaled = total > SMALLEST_SUM
    otherwise = torch.full_like(total, SMALLEST_SUM if "top_k" in inputs else 1.0)
    parts = {"margin": margin, "probs": probs.double(), "scaled": scaled, "otherwise": otherwise}
    return {"renorm_probs": Expected(weight / torch.where(scaled, total, otherwise), parts)}
