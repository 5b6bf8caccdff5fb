"""Corners of the sampling families: parameters at the ends of their ranges, on rows that show every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashinfer_trace.families.sampling.rows import NO_TOP_K, SamplingOptions, draw_count
from flashinfer_trace.harness.family import Plan, PlanRequest

__all__ = ["renorm_corners", "sampling_corners"]

#: The ordinary value of each parameter, where a corner says nothing of it.
USUAL = {"top_k": 8, "top_p": 0.9, "min_p": 0.02}

#: Sums on either side of the 1e-8 below which a renormalised row is not scaled as others are.
SMALL_SUMS = (1.5e-8, 7e-9)

#: Rows of one plan: each is drawn from often enough to miss a token of probability 0.05.
ROWS = 8


def parameters(request: PlanRequest) -> list[dict[str, Any]]:
    """Corner values of the parameters that the Definition has and the kernel takes, one or two at a time."""
    definition, options = request.definition, request.options_of(SamplingOptions)
    vocab_size = definition.const_axes["vocab_size"]
    values: dict[str, Sequence[Any]] = {
        "top_k": [k for k in (vocab_size, 1, vocab_size + 1, -1, NO_TOP_K, 2, vocab_size - 1) if k >= options.lowest_k],
        "top_p": ["boundary"] * 3 + [p for p in (1.0, 1.5, 0.999, 0.05) if p <= options.highest_p],
        "min_p": [0.0, 1.0, 0.5, 0.7, -0.5, 1.5],
    }
    corners = [{name: value} for name in values if name in definition.inputs for value in values[name]]
    if "top_k" in definition.inputs and "top_p" in definition.inputs:
        corners += [{"top_k": k, "top_p": "boundary"} for k in (vocab_size, 3)]
    return corners


def spec(request: PlanRequest, row: str, total: float = 1.0, **given: Any) -> dict[str, Any]:
    usual: Mapping[str, Any] = {name: value for name, value in USUAL.items() if name in request.definition.inputs}
    return {"row": row, "sum": total, **usual, **given}


def row_specs(request: PlanRequest) -> list[list[dict[str, Any]]]:
    """Specs of the rows of each plan: one corner per row."""
    options = request.options_of(SamplingOptions)
    corners = parameters(request)
    specs = [spec(request, "short", **corner) for corner in corners]
    if not options.sums_to_one:
        specs += [spec(request, row, total) for row in ("short", "trailing") for total in (0.5, 2.0)]
        specs += [spec(request, "zero", **corners[0])]
    plans = [specs[first : first + ROWS] for first in range(0, len(specs), ROWS)]
    # Every row at once without its filter, and every row that keeps nothing.
    off = {"top_k": NO_TOP_K, "top_p": 1.0, "min_p": 0.0}
    off = {name: value for name, value in off.items() if name in request.definition.inputs}
    if off.get("top_p", 0.0) <= options.highest_p:
        plans.append([spec(request, row, **off) for row in ("short", "normal")])
    if "top_k" in off and options.lowest_k <= 0:
        plans.append([spec(request, "few_valued", top_k=0)] * 2)
    return plans


def sampling_corners(request: PlanRequest) -> Sequence[Plan]:
    """As many draws as in `sampling_plans`, shared by the rows; and a batch of one."""
    total = draw_count(request)
    plans = [{"rows": len(specs), "draws": max(1, total // len(specs)), "specs": specs} for specs in row_specs(request)]
    return [*plans, {"rows": 1, "draws": 1, "specs": [spec(request, "short")]}]


def renorm_corners(request: PlanRequest) -> Sequence[Plan]:
    """Each row once; on a CPU also rows of tiny sums, and more rows than the tokens that are looked at."""
    options = request.options_of(SamplingOptions)
    vocab_size = request.definition.const_axes["vocab_size"]
    plans: list[Plan] = [{"rows": len(specs), "draws": 1, "specs": specs} for specs in row_specs(request)]
    if not request.large:
        # What a kernel makes of sums this small is its own affair: here the reference is held to what it says.
        plans.append(
            {"rows": 4, "draws": 1, "specs": [spec(request, row, s) for row in ("short", "normal") for s in SMALL_SUMS]}
        )
        if "top_k" in request.definition.inputs and vocab_size <= 64:
            count = vocab_size // 3
            plans.append({"rows": 2 * count, "draws": 1, "specs": [spec(request, "normal", top_k=count)]})
    return [plan for plan in plans if not options.sums_to_one or all(s["sum"] == 1 for s in plan["specs"])]
