"""Many cases of one Definition, against the oracle or against one kernel, drawn by hypothesis."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.case import CaseResult, case_line, run_case
from flashinfer_trace.harness.compare import Comparison
from flashinfer_trace.harness.family import Family, Kernel, Plan, PlanRequest

__all__ = ["OutputSummary", "Report", "prepare", "verify"]

#: Rounds of further draws when vacuous cases left too few real ones.
ROUNDS = 4


@dataclass
class OutputSummary:
    """Worst figures of one output over all real cases. Ratios are error / bound; errors are relative norms."""

    policy: str
    reference_worst: float = 0.0
    reference_error: float = 0.0
    kernel_worst: float = 0.0
    kernel_error: float = 0.0


@dataclass
class Report:
    """What `verify` found of one Definition and one target.

    Attributes:
        target: ``oracle``, or the kernel's label.
        status: ``passed``, ``failed`` or ``skipped``.
        cases, vacuous: distinct cases that count, and those that proved nothing.
        message: why it failed (ends with the line that repeats the case) or was skipped.
        twin_of: the Definition whose cases these were, if its small twin is the same (see `harness.twins`).
    """

    definition: str
    target: str
    device: str
    status: str = "passed"
    cases: int = 0
    vacuous: int = 0
    seed: int = 0
    seconds: float = 0.0
    message: str = ""
    twin_of: str = ""
    outputs: dict[str, OutputSummary] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """Largest error / bound of the target over all outputs."""
        summaries = self.outputs.values()
        return max((s.reference_worst if self.target == "oracle" else s.kernel_worst for s in summaries), default=0.0)


class CaseFailure(AssertionError):
    """Carries the report line of a failing case through hypothesis, which shrinks it."""


def prepare(definition: Definition, family: Family, device: str, full: bool) -> Definition:
    """The Definition at the sizes to run: the family's small twin on a CPU, unless `full`."""
    if full or torch.device(device).type == "cuda":
        return definition
    return definition.with_const_axes({a: v for a, v in family.twin.items() if a in definition.const_axes})


def verify(
    definition: Definition,
    family: Family,
    *,
    kernel: Kernel | None = None,
    device: str = "cpu",
    examples: int = 20,
    seed: int = 0,
    full: bool = False,
    plan: Plan | None = None,
    on_case: Callable[[CaseResult], None] | None = None,
) -> Report:
    """Runs cases until `examples` real ones have passed, one has failed, or the draws are used up.

    Args:
        definition: as loaded (real sizes).
        family: its record.
        kernel: compare this kernel too; otherwise the reference against the oracle only.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        examples: distinct real (not vacuous) cases required; fewer is a failure.
        seed: of hypothesis's draws; the seed of the elements is drawn by it.
        full: real sizes on a CPU too.
        plan: run this one case, with `seed` as the seed of its elements.
        on_case: called after each case, for progress.

    Returns:
        A Report; failures are in it, not raised. Unexpected errors of a kernel or a reference are failures as well.
    """
    sized = prepare(definition, family, device, full)
    report = Report(definition.name, kernel.label if kernel else "oracle", device, seed=seed)
    started = time.perf_counter()
    seen: set[str] = set()

    def run_one(plan: Plan, element_seed: int) -> None:
        key = repr((sorted(plan.items()), element_seed))
        if key in seen:
            return
        line = case_line(definition, plan, element_seed, device, kernel, full)
        try:
            result = run_case(sized, family, plan, element_seed, device, kernel)
        except Exception as error:
            raise CaseFailure(f"{type(error).__name__}: {error}\n  repeat: {line}") from error
        if on_case is not None:
            on_case(result)
        if result.failures:
            axes = f"axes {sized.bind_axes(family.inputs(sized, plan, element_seed, device))}"
            raise CaseFailure("\n  ".join([*result.failures, axes, f"repeat: {line}"]))
        seen.add(key)
        _count(report, result, family, kernel)

    try:
        if plan is not None:
            run_one(plan, seed)
        else:
            _draw(sized, family, kernel, device, examples, seed, report, run_one)
    except CaseFailure as failure:
        report.status, report.message = "failed", str(failure)
    if report.status == "passed" and plan is None and report.cases < examples:
        report.status = "failed"
        report.message = (
            f"only {report.cases} of {examples} cases prove something ({report.vacuous} vacuous); "
            f"make the family's plans draw fewer empty or zero cases"
        )
    report.seconds = time.perf_counter() - started
    return report


def _draw(
    definition: Definition,
    family: Family,
    kernel: Kernel | None,
    device: str,
    examples: int,
    seed: int,
    report: Report,
    run_one: Callable[[Plan, int], None],
) -> None:
    """Draws plans and element seeds until enough cases count."""
    large = torch.device(device).type == "cuda"
    request = PlanRequest(definition, kernel.limits if kernel else {}, large, kernel.plan_options if kernel else None)
    # Shrinking reruns a case up to hundreds of times: worth it on a small twin, not on a GPU.
    phases = [hypothesis.Phase.generate] if large else [hypothesis.Phase.generate, hypothesis.Phase.shrink]
    base = hypothesis.settings(
        database=None,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    element_seeds = st.integers(0, 2**31 - 1)
    for round_number in range(ROUNDS):
        if report.cases >= examples:
            return
        # A tenth more than is missing: some will be vacuous, and hypothesis begins each round with the simplest.
        settings = hypothesis.settings(base, max_examples=(examples - report.cases) * 11 // 10 + 2)
        test: Any = hypothesis.given(family.plans(request), element_seeds)(run_one)
        hypothesis.seed(seed + 1_000_003 * round_number)(settings(test))()


def _count(report: Report, result: CaseResult, family: Family, kernel: Kernel | None) -> None:
    if result.vacuous:
        report.vacuous += 1
        return
    report.cases += 1
    policies = family.policies(kernel)
    for name, reference in result.reference.items():
        summary = report.outputs.setdefault(name, OutputSummary(policies[name].reason))
        _raise_to(summary, "reference", reference)
        if name in result.kernel:
            _raise_to(summary, "kernel", result.kernel[name])


def _raise_to(summary: OutputSummary, who: str, comparison: Comparison) -> None:
    for figure, value in (("worst", comparison.ratio), ("error", comparison.error)):
        key = f"{who}_{figure}"
        setattr(summary, key, max(getattr(summary, key), value if math.isfinite(value) else math.inf))
