"""Plans of the sampling families: a few distinct rows of probabilities, each drawn from many times."""

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
#: 1, with ties, so float32 sums are exact in any order; ``one_hot``; ``zero``. Only corners have ``short``, ten
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
#: The smallest k. Kernels read a negative one as unsigned, so it is beyond every vocabulary.
ANY_K = -(1 << 31)

#: ``boundary`` stands for a cumulative mass of the row, in descending order; ``above`` and ``below``, of corners only,
#: for the float32 numbers next to it.
TOP_P = (0.05, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0, 1.5, "boundary")
BESIDE: dict[Any, int] = {"boundary": 0, "above": 1, "below": -1}
#: Of corners only: p of top-p beyond a cumulative mass, or short of it, and p of min-p beyond or short of the ratio of
#: a token to the largest, so a p that is 2 % off keeps another token.
NEAR: dict[Any, float] = {"over": 1.01, "under": 0.99}
#: Of corners only: float32 rounds the product of these down, so a product in float64 is above it.
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
        untied: only rows without ties, and only limits that keep something.
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
        return [kind for kind in given if not self.untied or kind in UNTIED]

    def takes(self, spec: Mapping[str, Any]) -> bool:
        return bool(self.kinds([spec["row"]])) and self.takes_p(spec.get("top_p", 1.0))


def is_joint(definition: Definition) -> bool:
    """Whether top-k and top-p look at the same row: otherwise top-p looks at what top-k kept, scaled to sum to 1."""
    return definition.name.startswith("top_k_top_p_joint_")


def draws_again(definition: Definition) -> bool:
    """Whether a first draw from the whole row comes before those from the kept tokens: the kernel samples by rejection.
    After another filter, and in min-p, a kernel knows the sum of what is kept before it draws."""
    return is_joint(definition) or ("top_k" in definition.inputs) != ("top_p" in definition.inputs)


def top_ks(vocab_size: int, low: int) -> st.SearchStrategy[int]:
    """k small, around the vocabulary's size and beyond; 0 and -1 where `low` allows them."""
    corners = [1, 2, vocab_size // 2, vocab_size - 1, vocab_size, vocab_size + 1, NO_TOP_K, 0, -1]
    small = st.integers(2, min(50, vocab_size // 2))
    return st.one_of(small, st.sampled_from([k for k in corners if k >= low]))


@st.composite
def row_specs(draw: st.DrawFn, request: PlanRequest, ordinary: bool) -> dict[str, Any]:
    """The properties of one row: its kind, its sum and its parameters. `ordinary` ones prove something for certain."""
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
    """`counts` rows, the first an ordinary one, and `total` draws over all (0: one each); on a GPU, where a reference
    sorts the row of every draw, two cases of three have a half or a quarter."""

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


#: The ordinary value of each parameter, where a corner says nothing of it.
USUAL = {"top_k": 8, "top_p": 0.9, "min_p": 0.02}

#: Sums on either side of the 1e-8 below which a renormalized row is not scaled as others are.
SMALL_SUMS = (1.5e-8, 1.004e-8, 7e-9)

#: Sums far from 1, of rows that are sampled from: no kernel takes them for nothing. The part of a row that top-k before
#: top-p keeps is divided by 1e-8 if its sum is smaller, so kernels have only the larger one; a third of it is kept.
FAINT_SUMS = (1e-7, 1e-12)
#: Draws on a GPU of each row of such a sum: enough for the three tokens that make it up.
FAINT_DRAWS = 100

#: The largest vocabulary where a case has more rows than tokens, and shows the least probable token.
MANY_ROWS = 64

#: Rows of one plan: each is drawn from often enough to miss a token of probability 0.05.
ROWS = 8


def parameters(request: PlanRequest) -> list[dict[str, Any]]:
    """Corner values of the parameters that the Definition has and the kernel takes, one at a time. First those that
    keep few tokens: where a row keeps many, all rows are looked at as a whole."""
    definition, options = request.definition, request.options_of(SamplingOptions)
    vocab_size = definition.const_axes["vocab_size"]
    values: dict[str, Sequence[Any]] = {
        "top_k": [
            k
            for k in (1, 2, vocab_size - 1, vocab_size, vocab_size + 1, -1, -2, ANY_K, NO_TOP_K)
            if k >= options.lowest_k
        ],
        "top_p": [p for p in (0.05, 0.2, 0.3, 1e-7, 1.0, 1.5, 0.999) if options.takes_p(p)],
        "min_p": [0.5, 1.0, 0.7, 1e-5, 0.0, -0.5, 1.5],
    }
    return [{name: value} for name in values if name in definition.inputs for value in values[name]]


def spec(request: PlanRequest, row: str, total: float = 1.0, **given: Any) -> dict[str, Any]:
    usual: Mapping[str, Any] = {name: value for name, value in USUAL.items() if name in request.definition.inputs}
    return {"row": row, "sum": total, **usual, **given}


def corner_specs(request: PlanRequest) -> list[list[dict[str, Any]]]:
    """Specs of the rows of each plan."""
    definition, options = request.definition, request.options_of(SamplingOptions)
    vocab_size = definition.const_axes["vocab_size"]
    corners = parameters(request)
    plans = [[spec(request, "short", **corner) for corner in corners[:3]]]
    # Every row at once without its filter, and every row that keeps nothing.
    off = {"top_k": NO_TOP_K, "top_p": 1.0, "min_p": 0.0}
    off = {name: value for name, value in off.items() if name in definition.inputs}
    if off.get("top_p", 0.0) <= options.highest_p:
        plans.append([spec(request, "halved", **off)])
        # In addition, rows that keep more than an eighth of a large vocabulary, but not all.
        many = [spec(request, "zipf", **{**off, "top_p": 0.93})] * 2 if "top_p" in off else []
        plans.append([spec(request, row, **off) for row in ("short", "normal")] + many)
    if "top_k" in off and options.lowest_k <= 0:
        plans.append([spec(request, "few_valued", top_k=0)] * 2)
    if "top_k" in off and vocab_size <= MANY_ROWS:
        # One token is left out, and it is the only one of its probability, which is large enough for it to be drawn.
        plans.append([spec(request, "zipf", **{**off, "top_k": vocab_size - 1})])
    if "top_p" in off and options.boundaries:
        # The limit is within one rounding of the mass of some tokens: a sum in float32 decides otherwise.
        every = {"top_k": vocab_size} if "top_k" in off else {}
        plans.insert(0, [spec(request, "short", **every, top_p="boundary")] * ROWS)
        beside = [spec(request, row, **every, top_p=p) for row in ("short", "dyadic") for p in ("above", "below")]
        if every:
            # Its limit is p times a kept sum, which float32 rounds as well: rows that sum to 0.7 show it.
            total = 1.0 if options.sums_to_one else 0.7
            plans.append([spec(request, "short", total, top_k=every["top_k"] + 1, top_p="boundary")] * ROWS)
        plans.append([*beside, spec(request, "dyadic", **every, top_p="boundary")])
    if "top_p" in off:
        every = {"top_k": vocab_size} if "top_k" in off else {}
        plans.append([spec(request, "few_valued", **every, top_p=0.0)] * 2)
    for name in ("top_p", "min_p"):
        if name in off:
            every = {"top_k": vocab_size} if "top_k" in off else {}
            given: list[dict[str, Any]] = [{**every, name: near} for near in ("over", "under")]
            plans.append([spec(request, "short", **each) for each in given])
    if "min_p" in off:
        # All tokens but one are at the same small share of that one, in a large vocabulary at less than 1e-5 of it.
        plans.insert(0, [spec(request, "halved", min_p=p) for p in ("over", "under", 1e-5)])
    specs = [spec(request, "short", **corner) for corner in corners[3:]]
    if "min_p" in off:
        specs.append(spec(request, "threshold", min_p=THRESHOLD_P))
    if not options.sums_to_one:
        specs += [spec(request, row, total) for row in ("short", "trailing") for total in (0.5, 2.0)]
        specs += [spec(request, "zero", **corners[-1])]
    return plans + [specs[first : first + ROWS] for first in range(0, len(specs), ROWS)]


def faint_rows(request: PlanRequest) -> list[dict[str, Any]]:
    """Specs of rows with sums far below 1 and few kept tokens; none for a kernel of rows that sum to 1. The first draw
    of a sampler by rejection goes to the last token there. Not all of these rows keep that token."""
    if request.options_of(SamplingOptions).sums_to_one:
        return []
    definition = request.definition
    divides = {"top_k", "top_p"} <= definition.inputs.keys() and not is_joint(definition)
    sums = FAINT_SUMS[:1] if request.large and divides else FAINT_SUMS
    few = {"top_k": 3} if "top_k" in definition.inputs else {}
    return [spec(request, "trailing", total, **few) for total in sums * 2]


def sampling_corners(request: PlanRequest) -> Sequence[Plan]:
    """A batch of one whose last token is not drawn; faint rows; and as many draws as in `sampling_plans`, shared by the
    rows."""
    total, options = draw_count(request), request.options_of(SamplingOptions)
    taken = ([one for one in specs if options.takes(one)] for specs in corner_specs(request))
    plans = [{"rows": len(each), "draws": max(1, total // len(each)), "specs": each} for each in taken if each]
    faint = faint_rows(request)
    if faint:
        draws = FAINT_DRAWS if request.large else max(1, total // len(faint))
        plans.insert(0, {"rows": len(faint), "draws": draws, "specs": faint})
    return [{"rows": 1, "draws": 1, "specs": [spec(request, "trailing")]}, *plans]


def renorm_corners(request: PlanRequest) -> Sequence[Plan]:
    """Each row once; on a CPU also rows of tiny sums, and more rows than the tokens that are looked at."""
    options = request.options_of(SamplingOptions)
    vocab_size = request.definition.const_axes["vocab_size"]
    plans: list[Plan] = [{"rows": len(specs), "draws": 1, "specs": specs} for specs in corner_specs(request)]
    if not request.large:
        # Kernels are not judged for sums this small. Here the reference must do what it says.
        everything: dict[str, Any] = {"top_k": NO_TOP_K} if "top_k" in request.definition.inputs else {"top_p": 1.5}
        small = [spec(request, row, total, **everything) for row in ("short", "normal") for total in SMALL_SUMS]
        small.append(spec(request, "smallest", **everything))
        if "top_k" in request.definition.inputs:
            # At the Definition's own size, which the first plans have too, k is in the thousands.
            specs = [*plans[0]["specs"], spec(request, "normal", top_k=vocab_size // 2)]
            plans[0] = {"rows": len(specs), "draws": 1, "specs": specs}
        else:
            # Sums of these rows are exact: a token before which there is exactly p of the mass is not kept.
            specs = [spec(request, "dyadic", top_p="boundary")] * ROWS
            plans.append({"rows": ROWS, "draws": 1, "specs": specs})
        plans.append({"rows": len(small), "draws": 1, "specs": small})
        if vocab_size <= MANY_ROWS:
            many = {"top_k": vocab_size // 3} if "top_k" in request.definition.inputs else {"top_p": 1.5}
            plans.append({"rows": vocab_size + 8, "draws": 1, "specs": [spec(request, "normal", **many)]})
    return [plan for plan in plans if not options.sums_to_one or all(s["sum"] == 1 for s in plan["specs"])]
