"""Corners of the sampling families: parameters at the ends of their ranges, on rows that show every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashinfer_trace.families.sampling.rows import ANY_K, NO_TOP_K, THRESHOLD_P, SamplingOptions, draw_count, is_joint
from flashinfer_trace.harness.family import Plan, PlanRequest

#: The ordinary value of each parameter, where a corner says nothing of it.
USUAL = {"top_k": 8, "top_p": 0.9, "min_p": 0.02}

#: Sums on either side of the 1e-8 below which a renormalized row is not scaled as others are.
SMALL_SUMS = (1.5e-8, 1.004e-8, 7e-9)

#: Sums far from 1, of rows that are sampled from: no kernel takes them for nothing. What top-k before top-p keeps of a
#: row is divided by 1e-8 if its sum is smaller, so kernels have only the larger one, of which a third is kept.
FAINT_SUMS = (1e-7, 1e-12)
#: Draws on a GPU of each row of such a sum: enough for the three tokens of which it is made.
FAINT_DRAWS = 100

#: The largest vocabulary of which a case has more rows than tokens, and shows the least probable token.
MANY_ROWS = 64

#: Rows of one plan: each is drawn from often enough to miss a token of probability 0.05.
ROWS = 8


def parameters(request: PlanRequest) -> list[dict[str, Any]]:
    """Corner values of the parameters that the Definition has and the kernel takes, one at a time.

    First those that keep few tokens: where a row keeps many, all rows are looked at as a whole.
    """
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


def row_specs(request: PlanRequest) -> list[list[dict[str, Any]]]:
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
        # Beside them rows of which more than an eighth of a large vocabulary is kept, but not all.
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
    """Specs of rows with sums far below 1, of which few tokens are kept; none for a kernel of rows that sum to 1.

    The last token, to which the first draw of a sampler by rejection goes there, is not among the kept ones of all.
    """
    if request.options_of(SamplingOptions).sums_to_one:
        return []
    definition = request.definition
    divides = {"top_k", "top_p"} <= definition.inputs.keys() and not is_joint(definition)
    sums = FAINT_SUMS[:1] if request.large and divides else FAINT_SUMS
    few = {"top_k": 3} if "top_k" in definition.inputs else {}
    return [spec(request, "trailing", total, **few) for total in sums * 2]


def sampling_corners(request: PlanRequest) -> Sequence[Plan]:
    """A batch of one, of which the last token is not drawn; faint rows; and as many draws as in `sampling_plans`,
    shared by the rows."""
    total, options = draw_count(request), request.options_of(SamplingOptions)
    taken = ([one for one in specs if options.takes(one)] for specs in row_specs(request))
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
    plans: list[Plan] = [{"rows": len(specs), "draws": 1, "specs": specs} for specs in row_specs(request)]
    if not request.large:
        # What a kernel makes of sums this small is its own affair: here the reference is held to what it says.
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
