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

__all__ = ["has_real_size", "input_bytes", "served_plan", "with_real_size"]

#: The memory of inputs up to which a case at a Definition's own sizes takes at most about a second.
REAL_BYTES = 32 * 2**20


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


def served_plan(job: Job) -> Plan:
    """The plan of a case as it is served, at the Definition's own sizes."""
    return job.family.plan_for_axes(job.definition, {}, Draws(0, "cpu"))


def with_real_size(job: Job, report: Report) -> Report:
    """The report of a job's small twin, if it passed, together with one case at the Definition's own sizes.

    Definitions whose inputs are large keep the report as it is.
    """
    if report.status != "passed" or not has_real_size(job.definition):
        return report
    real = verify(dataclasses.replace(job, full=True), plan=served_plan(job), seed=report.seed)
    both = dataclasses.replace(report, real_size=real.cases, seconds=report.seconds + real.seconds)
    return both if real.status == "passed" else dataclasses.replace(both, status=real.status, message=real.message)
