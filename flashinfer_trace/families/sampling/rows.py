"""Plans and inputs of the sampling families: a few distinct rows of probabilities, each drawn from many times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Plan, PlanRequest
from flashinfer_trace.harness.inputs import Draws, sizes

#: Kinds of rows. ``normal``: softmax of normal logits; ``peaked``: one token of 0.6; ``zipf``: 1 / rank^1.1 in random
#: order; ``uniform``: all tied; ``few_valued``: five values, one of them 0; ``dyadic``: multiples of UNIT that sum to
#: 1, with ties, so that float32 sums are exact in any order; ``one_hot``; ``zero``. Only corners have ``short``, ten
#: tokens of distinct probabilities around 0.1, the largest in the last place, and ``trailing``, the same without mass
#: in the last place: each of their tokens is drawn often; and ``halved``, one token of 0.5 and the rest shared by all
#: others: of all rows that the draws of one case can judge, it moves most with a temperature; ``smallest``, three
#: tokens that sum to exactly SMALLEST_SUM; and ``threshold``, THRESHOLD_LARGEST, a token at exactly THRESHOLD_P times
#: that in float32, and one with the rest.
ORDINARY = ("normal", "peaked", "zipf", "few_valued", "dyadic")
KINDS = (*ORDINARY, "uniform", "one_hot", "zero")
#: Kinds whose tokens have different probabilities, but for those that are hardly ever drawn.
UNTIED = ("normal", "peaked", "zipf", "one_hot", "short", "trailing")
UNIT = 2.0**-20
#: A renormalized row is scaled only if its sum is larger.
SMALLEST_SUM = 1e-8

#: SGLang's "no top-k" is 2^30.
NO_TOP_K = 1 << 30
#: The smallest k. Kernels read a negative one as unsigned, so that it is beyond every vocabulary.
ANY_K = -(1 << 31)

#: ``boundary`` stands for a cumulative mass of the row, in descending order; ``above`` and ``below``, of corners only,
#: for the float32 numbers next to it.
TOP_P = (0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0, 1.5, "boundary")
BESIDE: dict[Any, int] = {"boundary": 0, "above": 1, "below": -1}
#: Of corners only: p of top-p beyond a cumulative mass, or short of it, and p of min-p beyond or short of the ratio of
#: a token to the largest, so that a p that is 2 % off keeps another token.
NEAR: dict[Any, float] = {"over": 1.01, "under": 0.99}
#: Of corners only: float32 rounds the product of these down, so that a product in float64 is above it.
THRESHOLD_P, THRESHOLD_LARGEST = 0.6, 0.51
MIN_P = (0.0, 0.02, 0.1, 0.5, 1.0, 1.5, -0.5)


@dataclass(frozen=True)
class SamplingOptions:
    """The rows that a kernel takes.

    Attributes:
        lowest_k: smallest k.
        highest_p: largest p of top-p.
        sums_to_one: only rows that sum to 1.
        boundaries: p of top-p at a cumulative mass of the row, or the float32 number next to one.
        untied: only rows without ties, of which something is kept.
    """

    lowest_k: int = ANY_K
    highest_p: float = math.inf
    sums_to_one: bool = False
    boundaries: bool = True
    untied: bool = False

    def takes_p(self, p: float | str) -> bool:
        """Whether a p of top-p, a number or a name in `BESIDE` or `NEAR`, may be drawn."""
        if isinstance(p, str):
            return self.boundaries or p in NEAR
        return p <= self.highest_p and not (self.untied and p <= 0)

    def kinds(self, given: Sequence[str]) -> list[str]:
        """Those of these kinds of rows that the kernel takes."""
        return [kind for kind in given if not self.untied or kind in UNTIED]

    def takes(self, spec: Mapping[str, Any]) -> bool:
        """Whether the kernel takes a row of these parameters."""
        return bool(self.kinds([spec["row"]])) and self.takes_p(spec.get("top_p", 1.0))


def is_joint(definition: Definition) -> bool:
    """Whether top-k and top-p look at the same row: otherwise top-p looks at what top-k kept, scaled to sum to 1."""
    return definition.name.startswith("top_k_top_p_joint_")


def draws_again(definition: Definition) -> bool:
    """Whether a first draw from the whole row comes before those from the kept tokens: the kernel samples by rejection.

    After another filter, and in min-p, a kernel knows the sum of what is kept before it draws.
    """
    return is_joint(definition) or ("top_k" in definition.inputs) != ("top_p" in definition.inputs)


def top_ks(vocab_size: int, low: int) -> st.SearchStrategy[int]:
    """k small, around the vocabulary's size and beyond; 0 and -1 where `low` allows them."""
    corners = [1, 2, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1, NO_TOP_K, 0, -1]
    small = st.integers(2, min(50, vocab_size // 2))
    return st.one_of(small, st.sampled_from([k for k in corners if k >= low]))


@st.composite
def row_specs(draw: st.DrawFn, request: PlanRequest, ordinary: bool) -> dict[str, Any]:
    """What one row is: its kind, its sum and its parameters. `ordinary` ones prove something for certain."""
    definition = request.definition
    vocab_size = definition.const_axes["vocab_size"]
    options = request.options_of(SamplingOptions)
    spec: dict[str, Any] = {"row": draw(st.sampled_from(options.kinds(ORDINARY if ordinary else KINDS)))}
    spec["sum"] = 1.0 if options.sums_to_one else draw(st.sampled_from((1.0, 1.0, 1.0, 0.5, 2.0)))
    if "top_k" in definition.inputs:
        small = st.integers(2, vocab_size // 4) if vocab_size <= 1024 else st.integers(2, 200)
        spec["top_k"] = draw(small if ordinary else top_ks(vocab_size, options.lowest_k))
    if "top_p" in definition.inputs:
        usual = (0.5, 0.9, 0.95, 0.999, "boundary")
        drawn = usual if ordinary else (0.0, *TOP_P)
        spec["top_p"] = draw(st.sampled_from([p for p in drawn if options.takes_p(p)]))
    if "min_p" in definition.inputs:
        spec["min_p"] = draw(st.sampled_from((0.02, 0.1) if ordinary else MIN_P))
    # Where nothing is kept the samplers return token 0, but for a row with one token of (nearly) all the mass: their
    # search ends at 1 with that token. The interface asks for k > 0 and p > 0; this corner is left out.
    if spec.get("top_k") == 0 or spec.get("top_p") == 0:
        spec["row"], spec["sum"] = "few_valued", 1.0
        if spec.get("top_k", 0) > 0:
            spec["top_k"] = max(spec["top_k"], 8)
    return spec


def plans(request: PlanRequest, counts: tuple[int, ...], total: int) -> st.SearchStrategy[Plan]:
    """`counts` rows, the first of which is an ordinary one, and `total` draws over all of them (0: one draw each).

    On a GPU, where a reference sorts the row of every draw, two cases of three have half as many draws or a quarter.
    """

    totals = (total // 4, total // 2, total) if request.large else (total,)

    @st.composite
    def build(draw: st.DrawFn) -> Plan:
        rows = draw(st.sampled_from(counts) if total else sizes(counts[0], counts[-1]))
        extra = min(rows, 8) - 1
        specs = [draw(row_specs(request, True)), *(draw(row_specs(request, False)) for _ in range(extra))]
        return {"rows": rows, "draws": draw(st.sampled_from(totals)) // rows if total else 1, "specs": specs}

    return build()


def sampling_plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    """Enough draws to see a temperature of 1.1 on a normal row: 1 GB on a GPU, at most 64 MB on a CPU."""
    return plans(request, (1, 2, 4), draw_count(request))


def draw_count(request: PlanRequest) -> int:
    """Draws of one case, over all its rows."""
    return 2048 if request.large else min(8192, 2**24 // request.definition.const_axes["vocab_size"])


def renorm_plans(request: PlanRequest) -> st.SearchStrategy[Plan]:
    return plans(request, (1, 48 if request.large else 12), 0)


def plan_for_axes(definition: Definition, axes: Mapping[str, int], draws: Draws) -> Plan:
    """One draw of each of batch_size rows, with parameters as served."""
    usual = {"row": "normal", "sum": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.1}
    spec = {key: value for key, value in usual.items() if key in ("row", "sum") or key in definition.inputs}
    return {"rows": axes.get("batch_size", 8), "draws": 1, "specs": [spec]}
