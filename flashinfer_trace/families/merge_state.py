"""Merging two states of attention over disjoint keys, with lse in base 2 (flashinfer) and in base e (sgl-kernel).

From flashinfer's source (0.7.2, cascade.cuh, MergeStateKernel) and measurements on an H200, the kernels work like this:

- They subtract the larger lse, exponentiate, divide by the sum, and add the two products, all in float32.
- A state without keys (lse -inf) has weight 0 if the other state has keys. If neither has, the correct output is 0, and
  the correct lse -inf. flashinfer's kernel returns them; 0.6.12 subtracted -inf from itself and returned NaN, as
  sgl-kernel's does, which is given no such rows.
- sgl-kernel treats an lse of +inf as -inf, and so does the Triton kernel that SGLang has for other sizes: some kernels
  of attention report it for a request without keys. flashinfer's kernel does not, and is given none.
- flashinfer's blocks have one thread for every max(8, head_dim / 32) features of all heads, at most 1024 threads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from flashinfer_trace.families.calls import calling
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Plan, PlanRequest, ReferenceRun
from flashinfer_trace.harness.inputs import ROWS_SPREAD, Draws
from flashinfer_trace.harness.plans import Count, Drawn, RowPlans
from flashinfer_trace.harness.refusals import raised_by
from flashinfer_trace.verdict.compare import ErrorBound, Expected, rounding_error, unit_roundoff

FLOAT32 = unit_roundoff(torch.float32)
#: Float32 results below this may be flushed to zero.
SMALLEST = torch.finfo(torch.float32).smallest_normal
#: The rounding of a float32 result below that, where it is not flushed.
SUBNORMAL = 2.0**-150
#: How the two lses of a case differ. ``near``: both weights matter; ``equal``: both weights are one half; ``apart``: by
#: hundreds, so one weight vanishes; ``large``: both are in the thousands and close to each other; ``nothing``: one
#: or both are -5e4, which flashinfer's kernels wrote for -inf until 0.6.12 at least; ``mixed``: all of these.
SPREADS = ("near", "equal", "apart", "large", "nothing")
#: Lses of corners only: both above 70,000 and close to each other, so exp of 1.6 % of them exceeds float64's
#: range. Kernels subtract the larger of the two, which is exact for numbers so close, and so keep their bounds.
CORNER_SPREAD = "vast"
#: Rows without keys: on one side, on the other, and on both.
EMPTY = ("a", "b", "both")
#: Their lses.
NO_KEYS, NO_KEYS_BASE_E = (-math.inf,), (-math.inf, math.inf)
#: ``spread``: heads of tokens that are 2^-10 to 2^10 times as large, next to each other.
VALUES = {"normal": 1.0, "large": 1e4, "tiny": 1e-4, "spread": 1.0}
#: Values of corners only, near the ends of bf16's range: a sum of the two states before they are weighted overflows.
CORNER_VALUES = {"huge": 1.5e38, "minute": 1e-36}
LARGEST_VALUE = torch.finfo(torch.bfloat16).max
FLASHINFER_INFINITY = 5e4


@dataclass(frozen=True)
class MergeOptions:
    """Choices that plans can draw for a kernel: rows without keys in both states."""

    both_empty: bool = True


def sides(request: PlanRequest) -> list[str]:
    both = request.options_of(MergeOptions).both_empty
    return [side for side in EMPTY if both or side != "both"]


def corners(request: PlanRequest) -> list[Plan]:
    """Each way in which lses differ, rows without keys on each side, and values at the ends of bf16's range."""
    return [
        *({"spread": spread} for spread in (*SPREADS, CORNER_SPREAD)),
        *({"spread": "near", "empty": [side]} for side in sides(request)),
        *({"spread": "near", "values": values} for values in CORNER_VALUES),
        {"spread": "equal", "values": "huge"},
        {"values": "large", "empty": sides(request)},
    ]


PLAN = RowPlans(
    {"seq_len": Count(40, 4096, corner=24)},
    {
        "spread": ("mixed", *SPREADS),
        "values": tuple(VALUES),
        "empty": Drawn(lambda request: st.lists(st.sampled_from(sides(request)), unique=True), lambda *_: []),
    },
    special=corners,
)


def accepted_rows(definition: Definition, run: ReferenceRun) -> list[str]:
    """A line if the reference takes an lse with more rows than its values have, which broadcasting would hide."""
    heads, dim = (definition.const_axes[axis] for axis in ("num_heads", "head_dim"))
    v, s = torch.ones(1, heads, dim, dtype=torch.bfloat16), torch.zeros(2, heads)
    raised = raised_by(lambda: run(definition, {"v_a": v, "s_a": s, "v_b": v, "s_b": s}))
    if raised == AssertionError.__name__:
        return []
    found = "were accepted" if raised is None else f"raised {raised} instead of AssertionError"
    return [f"reference: lses of 2 rows with values of 1 row {found}; assert that their shapes agree"]


def draw_lses(spread: str, shape: tuple[int, int], draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 lses of both states [seq_len, num_heads]; see `SPREADS`."""
    a, b = (draws.normal(shape, scale=3.0) for _ in range(2))
    if spread == "equal":
        return a, a.clone()
    if spread == "apart":
        return a * 100, b * 100
    if spread == "large":
        offset = draws.normal(shape, scale=3000.0)
        return a + offset, b + offset
    if spread == CORNER_SPREAD:
        offset = 70_000.0 + 1000.0 * draws.normal(shape).abs()
        return a + offset, b + offset
    if spread == "nothing":
        absent = draws.integers(shape, 0, 2)  # a alone, b alone, or both
        return a.masked_fill(absent != 1, -FLASHINFER_INFINITY), b.masked_fill(absent != 0, -FLASHINFER_INFINITY)
    return a, b


def make_inputs(no_keys: tuple[float, ...], definition: Definition, plan: Plan, draws: Draws) -> Inputs:
    count = plan["seq_len"]
    heads, dim = (definition.const_axes[axis] for axis in ("num_heads", "head_dim"))
    scale = {**VALUES, **CORNER_VALUES}[plan["values"]]
    values = [draws.normal([count, heads, dim], torch.bfloat16, scale) for _ in range(2)]
    if plan["values"] == "spread":
        factors = draws.powers(count * heads, *ROWS_SPREAD).view(count, heads, 1)
        values = [value.mul_(factors) for value in values]
    values = [value.clamp_(-LARGEST_VALUE, LARGEST_VALUE) for value in values]
    spreads = SPREADS if plan["spread"] == "mixed" else (plan["spread"],)
    pairs = [draw_lses(spread, (count, heads), draws) for spread in spreads]
    which = draws.integers([count, heads], 0, len(pairs) - 1).unsqueeze(0)
    s_a, s_b = (torch.stack(list(of_spread)).gather(0, which)[0] for of_spread in zip(*pairs, strict=True))
    # Each kind of empty row takes every seventh place, at a different offset, so most rows keep their keys.
    index = torch.arange(count * heads, device=draws.device).view(count, heads)
    place, turn = index % 7, index // 7
    absent_a, absent_b = (torch.tensor(no_keys, device=draws.device)[(turn + by) % len(no_keys)] for by in (0, 1))
    for position, side in enumerate(EMPTY):
        if side in plan["empty"]:
            here = place == position
            s_a = torch.where(here, absent_a, s_a) if side != "b" else s_a
            s_b = torch.where(here, absent_b, s_b) if side != "a" else s_b
    return {"v_a": values[0], "s_a": s_a, "v_b": values[1], "s_b": s_b}


def oracle(log_of_base: float, definition: Definition, inputs: Inputs) -> dict[str, Expected]:
    """The shares as sigmoids of the difference of the lses, and the merged lse by logaddexp. Parts: ``magnitude``, w_a
    |v_a| + w_b |v_b| for shares w; ``apart``, w_a w_b |v_a - v_b|, the effect on v of a relative error of one
    exponential; ``smaller``, the smaller share; ``distance`` of the lses in nats (0 where one is infinite, whose
    exponential is exact); ``values``, |v_a| + |v_b|."""
    s_a, s_b = (s.masked_fill(s == math.inf, -math.inf).double() * log_of_base for s in (inputs["s_a"], inputs["s_b"]))
    v_a, v_b = (inputs[name].double() for name in ("v_a", "v_b"))
    empty = (s_a == -math.inf) & (s_b == -math.inf)
    difference = torch.where(empty, 0.0, s_a - s_b)
    share_a, share_b = (torch.sigmoid(x).masked_fill(empty, 0.0) for x in (difference, -difference))
    of_a, of_b = share_a.unsqueeze(-1) * v_a, share_b.unsqueeze(-1) * v_b
    distance = torch.where(difference.isfinite(), difference.abs(), 0.0)
    lse = torch.logaddexp(s_a, s_b) / log_of_base
    parts = {
        "magnitude": of_a.abs() + of_b.abs(),
        "apart": (share_a * share_b).unsqueeze(-1) * (v_a - v_b).abs(),
        "distance": distance.unsqueeze(-1),
        "values": v_a.abs() + v_b.abs(),
    }
    of_lse = {"smaller": torch.minimum(share_a, share_b), "distance": distance}
    return {"v_merged": Expected(of_a + of_b, parts), "s_merged": Expected(lse, of_lse)}


def exponential_error(expected: Expected) -> torch.Tensor:
    """Relative error of the smaller exponential: its argument is rounded by the subtraction of the larger lse and,
    where exp is exp2, by the product with log2(e); ex2.approx is within 2^-22 (four roundings), and expf is closer."""
    return FLOAT32 * (2 * expected.parts["distance"] + 4)


def kernel_output_bound(expected: Expected) -> torch.Tensor:
    """One bf16 rounding of the sum of two float32 products, whose shares carry a few roundings."""
    parts = expected.parts
    inside = 8 * FLOAT32 * parts["magnitude"] + exponential_error(expected) * parts["apart"]
    # Kernels flush subnormal numbers: a share, which its value multiplies, and each of the two products.
    flushed = SMALLEST * (2 + parts["values"])
    return rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8) + inside + flushed


def kernel_lse_bound(log_of_base: float, expected: Expected) -> torch.Tensor:
    """float32: the final sum, a logarithm of a number from 1 to 2, and the smaller exponential in it."""
    size = torch.where(expected.value.isfinite(), expected.value.abs(), 0.0)
    inside = 8 * FLOAT32 + exponential_error(expected) * expected.parts["smaller"]
    return FLOAT32 * 2 * size + inside / log_of_base


def output_bound(expected: Expected) -> torch.Tensor:
    """One bf16 rounding of the sum of two float32 products. A share below 2^-126 is rounded to a multiple of 2^-149,
    which its value multiplies: on an H200, a share of 2^-139 of 4,992 next to a value of 0."""
    subnormal = torch.where(expected.parts["distance"] > -math.log(SMALLEST), SUBNORMAL * expected.parts["values"], 0.0)
    rounded = rounding_error(expected.value, torch.bfloat16) * (1 + 2**-8)
    return rounded + 4 * FLOAT32 * expected.parts["magnitude"] + subnormal


OUTPUT = ErrorBound(
    output_bound,
    "one bf16 rounding, u = 2^-8, of the sum of two float32 products with rounded shares: "
    "4 * 2^-24 (w_a |v_a| + w_b |v_b|); a share below 2^-126 is 2^-150 off: 2^-150 (|v_a| + |v_b|)",
)
LSE = ErrorBound(
    lambda expected: rounding_error(expected.value.nan_to_num(neginf=0.0), torch.float32) * (1 + 2**-20) + 2.0**-51,
    "one float32 rounding of a float64 logarithm, which is within 2^-51 where it is near 0",
)
KERNEL_OUTPUT = ErrorBound(
    kernel_output_bound,
    "one bf16 rounding, u = 2^-8, of a float32 result: 8 * 2^-24 (w_a |v_a| + w_b |v_b|) for the sum, the division and "
    "the products; an error of 2^-24 (2 d + 4) of the smaller exponential, d nats below the other, passes through the "
    "shares; a share and two products below 2^-126 are 0",
)


def family(name: str, log_of_base: float, no_keys: tuple[float, ...], kernel: Kernel) -> Family:
    """The record of one base of the lse, with the only kernel that uses it; settings of all kernels are set here."""
    lse = ErrorBound(
        functools.partial(kernel_lse_bound, log_of_base),
        "float32 roundings, 2 * 2^-24 |s|; 8 * 2^-24 nats for a logarithm of a number from 1 to 2 and its product with "
        "ln 2; an error of 2^-24 (2 d + 4) of the smaller exponential, d nats below the other, times its share",
    )
    return Family(
        name=name,
        op_type="merge_state",
        twin={"num_heads": 3, "head_dim": 64},
        plan=PLAN,
        checks=(accepted_rows,),
        isolated=("v_a", "v_b"),  # its kernel takes dense states only
        make_inputs=functools.partial(make_inputs, no_keys),
        oracle=functools.partial(oracle, log_of_base),
        compare={"v_merged": OUTPUT, "s_merged": LSE},
        kernels=(
            replace(kernel, limits={"seq_len": (1, 1 << 20)}, compare={"v_merged": KERNEL_OUTPUT, "s_merged": lse}),
        ),
    )


SGL = "sgl_kernel.merge_state_v2", "v_a s_a v_b s_b v_merged s_merged"
FAMILIES = (
    family("merge_state", math.log(2.0), NO_KEYS, calling("flashinfer.cascade.merge_state", "v_a s_a v_b s_b")),
    family("merge_state_base_e", 1.0, NO_KEYS_BASE_E, calling(*SGL, plan_options=MergeOptions(both_empty=False))),
)
