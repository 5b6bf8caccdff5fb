"""Real kernels whose libraries a test emulates, on the cases that hypothesis draws for them and on their corners."""

from __future__ import annotations

import hypothesis

from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import Kernel, PlanRequest
from flashinfer_trace.harness.verify import prepare


def assert_kernel_passes(definition: Definition, kernel: Kernel, real: int, as_on_gpu: bool = False) -> None:
    """Asserts that no case of the small twin fails, and that so many of 25 drawn ones prove something.

    Args:
        as_on_gpu: whether the corners are those for a GPU.
    """
    family = family_of(definition)
    small = prepare(definition, family, "cpu", full=False)
    request = PlanRequest(small, kernel.limits, False, kernel.plan_options)
    vacuous: list[bool] = []

    @hypothesis.settings(max_examples=25, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(3)
    @hypothesis.given(family.plans(request))
    def check(plan):
        result = run_case(small, family, plan, 5, "cpu", kernel)
        assert not result.failures and result.kernel
        vacuous.append(bool(result.vacuous))

    check()
    corners = PlanRequest(small, kernel.limits, as_on_gpu, kernel.plan_options)
    for number, plan in enumerate(family.corners(corners)):
        result = run_case(small, family, plan, number, "cpu", kernel)
        assert not result.failures, f"{plan}: {result.failures}"
    assert vacuous.count(False) >= real
