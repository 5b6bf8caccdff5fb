"""Cases at a Definition's own sizes on a CPU, where one takes about a second: what a small twin cannot show.

A reference that looks at the first 4096 of 7168 features is right at every size up to 4096.
"""

from __future__ import annotations

import dataclasses
import math

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Plan
from flashinfer_trace.harness.inputs import Draws, torch_dtype
from flashinfer_trace.harness.verify import Job, Report, verify

__all__ = ["REAL_BYTES", "has_real_size", "input_bytes", "real_cases", "with_real_size"]

#: The memory of inputs up to which a case at a Definition's own sizes takes at most about a second.
REAL_BYTES = 72 * 2**20

#: How many of the family's corners, the first ones, are run at a Definition's own sizes too.
REAL_CORNERS = 3


def input_bytes(definition: Definition) -> int:
    """Memory of the inputs where every variable axis is 1: that of the weights."""
    shapes = definition.input_shapes(dict.fromkeys(definition.var_axes, 1))
    return sum(
        math.prod(shape) * torch_dtype(definition.inputs[name].dtype).itemsize
        for name, shape in shapes.items()
        if shape
    )


def has_real_size(definition: Definition) -> bool:
    """Whether a case at the Definition's own sizes takes at most about a second."""
    return input_bytes(definition) <= REAL_BYTES


def real_cases(full: Job, seed: int, corners: bool) -> list[tuple[Plan, int]]:
    """Plans and element seeds of the cases at the sizes of a job that is `full`.

    The first is drawn as the kernel is served, with the seed `seed`; with `corners`, the first of the family follow it.
    """
    served = full.family.plan_for_axes(full.definition, {}, Draws(0, "cpu"))
    first = full.corners[:REAL_CORNERS] if corners else ()
    return [(served, seed), *((plan, number) for number, plan in enumerate(first))]


def with_real_size(job: Job, report: Report, corners: bool) -> Report:
    """The report of a job's small twin, if it passed, together with `real_cases` at the Definition's own sizes.

    Definitions whose inputs are large keep the report as it is: what their references do at their own sizes, only a GPU
    shows (`flashinfer-trace verify` says so). `real_size` is 0 where the served case is vacuous.
    """
    if report.status != "passed" or not has_real_size(job.definition):
        return report
    full = dataclasses.replace(job, full=True)
    for plan, seed in real_cases(full, report.seed, corners):
        real = verify(full, plan=plan, seed=seed)
        cases, seconds = report.real_size + real.cases, report.seconds + real.seconds
        report = dataclasses.replace(report, status=real.status, message=real.message, real_size=cases, seconds=seconds)
        if report.status != "passed" or not report.real_size:
            break
    return report
