"""Many cases of one Definition, against the oracle or against kernels that share them, drawn by hypothesis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import hypothesis

from flashinfer_trace.harness.case import CaseResult, SharedCase, reference_run, shared_case
from flashinfer_trace.harness.cases import Case, cases, shrink
from flashinfer_trace.harness.family import FamilyError, Plan
from flashinfer_trace.harness.job import Job, prepare, rounds
from flashinfer_trace.harness.layouts import FAR, LAYOUT
from flashinfer_trace.harness.refusals import accepted_wrong_sizes
from flashinfer_trace.harness.report import OutputSummary, Report
from flashinfer_trace.sandbox.limits import Budget, ReferenceFailed, ReferenceLimits
from flashinfer_trace.verdict.pooled import Pool

__all__ = ["Job", "OutputSummary", "Report", "prepare", "verify", "verify_together"]

#: Two right draws of this many rows agree with a probability below 1e-9 if none has a token of more than 0.7.
SEEDED_ROWS = 64


#: The message about a case that failed once.
UNSTABLE = "failed once, and passed when the same case was run again: results change by themselves"


class CaseFailure(AssertionError):
    """Carries the report line of a failing case through hypothesis, which shrinks it."""


def verify(
    job: Job,
    *,
    examples: int = 20,
    seed: int = 0,
    plan: Plan | None = None,
    on_case: Callable[[SharedCase, CaseResult], None] | None = None,
) -> Report:
    """The report of one job: see `verify_together`."""
    return verify_together([job], examples=examples, seed=seed, plan=plan, on_case=on_case)[0]


def verify_together(
    jobs: Sequence[Job],
    *,
    examples: int = 20,
    seed: int = 0,
    plan: Plan | None = None,
    on_case: Callable[[SharedCase, CaseResult], None] | None = None,
) -> list[Report]:
    """Runs the family's corners, then cases until `examples` real ones have passed, one failed, or draws are used up.

    Jobs for which the same plans may be drawn share their cases (see `rounds`): inputs, reference and oracle are
    computed once. One that fails does not stop the others. For a reference on a CPU it also checks that inputs of a
    wrong size are refused, and runs the family's own `checks`.

    Args:
        jobs: targets of one Definition, on one device and at the same sizes.
        examples: distinct real (not vacuous) cases required of each in addition to the corners; fewer is a failure.
        seed: of hypothesis's draws; the seed of the elements is drawn by it.
        plan: run this one case, with `seed` as the seed of its elements; ``{"layout": "far"}`` is the family's case
            with offsets beyond 32 bits, which takes up to 40 GB of a GPU.
        on_case: called after each case of each job.

    Returns:
        A Report of each job in turn; failures are in it, not raised. Unexpected errors of a kernel or a reference are
        failures as well.
    """
    targets = [_Target(job, Report(job.definition.name, job.target, job.device, seed=seed)) for job in jobs]
    for each in rounds(jobs, examples):
        running = [targets[number] for number in each.numbers if targets[number].report.status == "passed"]
        if not running:
            continue
        started = time.perf_counter()
        for target in running:
            target.report.plans.counts.append(0)
        _Cases(jobs[each.numbers[0]], running, seed, on_case).verify(each.examples, plan)
        seconds = (time.perf_counter() - started) / len(running)
        for target in running:
            target.report.seconds += seconds
    return [target.report for target in targets]


@dataclass
class _Target:
    """One job, with what was found of it so far.

    Attributes:
        passed: the cases that it has passed.
        before: real cases that it had before any were drawn.
        pools: what is added up over all cases, of the reference and of the kernel.
    """

    job: Job
    report: Report
    passed: set[str] = field(default_factory=set)
    before: int = 0
    pools: tuple[Pool, Pool] = field(default_factory=lambda: (Pool(), Pool()))

    def fail(self, message: str) -> None:
        self.report.status, self.report.message = "failed", message

    def count(self, result: CaseResult) -> None:
        """Counts a case in that passed."""
        report = self.report
        report.plans.add(result.plan, result.seed, bool(result.vacuous))
        if result.vacuous:
            report.vacuous += 1
            return
        report.cases += 1
        for pool, compared in zip(self.pools, (result.reference, result.kernel), strict=True):
            pool.add(compared)
        policies = self.job.family.policies(self.job.kernel)
        for name, reference in result.reference.items():
            summary = report.outputs.setdefault(name, OutputSummary(policies[name].reason))
            summary.add(reference, result.kernel.get(name))

    def judge_seeds(self) -> None:
        """Fails a sampler whose seed makes no difference to `SEEDED_ROWS` rows, which chance cannot explain."""
        kernel, job = self.job.kernel, self.job
        if kernel is not None and kernel.seeded is not None:
            rows = dict.fromkeys(job.sized.var_axes, SEEDED_ROWS)
            if kernel.ignores_seed(job.sized, job.family.inputs_for_axes(job.sized, rows, 0, job.device)):
                self.fail(f"{kernel.label} draws the same with two seeds, {SEEDED_ROWS} rows each")

    def judge_pools(self) -> None:
        """Fails a sampler whose draws of all cases together are not those that they should be."""
        for who, pool in zip(("reference", self.job.target), self.pools, strict=True):
            message = pool.failure(f"{who}: ")
            if message:
                self.fail(message)

    def judge_number(self, examples: int) -> None:
        """Fails if cases are missing."""
        report = self.report
        if report.cases < self.before + examples:
            self.fail(
                f"only {report.cases - self.before} of {examples} cases prove something ({report.vacuous} vacuous); "
                f"make the family's plans draw fewer empty or zero cases"
            )


class _Cases:
    """Runs the cases that some jobs share, each once, and counts them in their reports."""

    def __init__(
        self, job: Job, targets: Sequence[_Target], seed: int, on_case: Callable[[SharedCase, CaseResult], None] | None
    ) -> None:
        """`job` is what plans are drawn for; it may have failed already, and so not be one of the targets."""
        self._job, self._seed, self._on_case = job, seed, on_case
        self._running = list(targets)
        self._examples = 0
        self._real: tuple[Plan, int] | None = None
        self._broken: CaseFailure | None = None
        self._shrunk: CaseFailure | None = None
        self._budget: Budget | None = None

    def verify(self, examples: int, plan: Plan | None) -> None:
        """Runs the corners and `examples` cases, or the one of this plan: see `verify_together`."""
        try:
            self._check_records()
            if plan is not None:
                self.run(self._job.far_plan if plan == {LAYOUT: FAR} else plan, self._seed)
            elif self._running:
                self._all(examples)
        except (CaseFailure, FamilyError) as failure:
            self._fail(str(failure))
        except hypothesis.errors.FlakyFailure as flaky:
            if self._broken is not None:  # it was not run again
                self._fail(str(self._broken))
                return
            lines = "\n  ".join(str(failure) for failure in flaky.exceptions)
            self._fail(f"{UNSTABLE}\n  {lines}")

    def _fail(self, message: str) -> None:
        for target in self._running:
            target.fail(message)

    def _check_records(self) -> None:
        for target in list(self._running):
            try:
                target.job.family.check(target.job.definition, target.job.kernel)
            except FamilyError as error:
                target.fail(str(error))
                self._running.remove(target)

    def _all(self, examples: int) -> None:
        job, corners = self._job, self._job.corners
        limits = job.worker.limits if job.worker else ReferenceLimits()
        self._budget = Budget(job.definition.name, len(corners) + examples, limits)
        self._examples = examples
        for target in self._running:
            target.before = target.report.cases
        for case in cases(job, self._seed, lambda: self.missing):
            self._run_or_shrink(case)
        if job.kernel is None and not job.large:
            with self._spending():
                self.check_reference()
        for target in self._running:
            target.judge_pools()
            target.judge_seeds()
            target.judge_number(examples)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """The block takes its time from the budget: that of the reference's process, or all of it where there is none,
        because what a reference asks of a GPU is done when its outputs are compared."""
        worker = None if self._job.large else self._job.worker
        if worker is not None:
            with worker.within(self._budget):
                yield
        else:
            with self._budget.spending() if self._budget else nullcontext():
                yield

    def check_reference(self) -> None:
        """Raises CaseFailure if a reference takes inputs of a wrong size, or a check of its family has lines to say."""
        job = self._job
        run = reference_run(job.worker)
        try:
            lines = [line for check in job.family.checks for line in check(job.sized, run)]
        except Exception as error:  # of the reference, which may raise anything
            raise CaseFailure(f"{type(error).__name__}: {error}") from error
        if self._real is not None:
            inputs = job.family.inputs(job.sized, *self._real, job.device)
            lines += accepted_wrong_sizes(job.sized, inputs, lambda wrong: run(job.sized, wrong))
        if lines:
            raise CaseFailure("\n  ".join(lines))

    def _run_or_shrink(self, case: Case) -> None:
        """Runs a case; of one that was drawn and fails, the smallest like it."""
        try:
            ran = self.run(case.plan, case.seed)
        except CaseFailure as failure:
            # Shrinking reruns a case up to hundreds of times: worth it on a small twin, not on a GPU.
            if case.kind == "corner" or self._job.large or self._broken is not None:
                raise
            shrink(self._job, case, self.run)
            raise CaseFailure(f"{UNSTABLE}\n  {failure}") from failure
        for target in self._running if case.kind == "corner" else ():
            target.report.corners += ran
            target.before = target.report.cases

    @property
    def missing(self) -> int:
        """How many more real cases some job needs."""
        return max((target.before + self._examples - target.report.cases for target in self._running), default=0)

    def run(self, plan: Plan, seed: int) -> bool:
        """Runs one case, unless it has passed before; returns whether it ran. Raises CaseFailure if no job passed."""
        key = repr((sorted(plan.items()), seed))
        if all(key in target.passed for target in self._running):
            return False
        if self._broken is not None:
            raise self._broken
        job = self._job
        shared: SharedCase | Exception
        try:
            with self._spending():
                worker = None if job.large else job.worker
                shared = shared_case(job.sized, job.family, plan, seed, job.device, worker)
        except ReferenceFailed as error:
            # Not run again to shrink the case: a reference that hangs would hang hundreds of times. If a case was being
            # shrunk when the time was spent, what is wrong with that one says more.
            shrunk = self._shrunk if error.kind == "too-slow" else None
            self._broken = shrunk or CaseFailure(f"{error}\n  repeat: {job.line(plan, seed)}")
            raise self._broken from error
        except Exception as error:
            shared = error
        failed = [(each, line) for each in self._running if (line := self._failure(each, shared, plan, seed))]
        for target, message in failed:
            # The last one stays, and is raised: hypothesis shrinks it.
            if len(self._running) == 1:
                self._shrunk = CaseFailure(message)
                raise self._shrunk
            target.fail(message)
            self._running.remove(target)
        for target in self._running:
            target.passed.add(key)
        return True

    def _failure(self, target: _Target, shared: SharedCase | Exception, plan: Plan, seed: int) -> str:
        """Counts the case in for one job; why it failed, with the line that repeats it, or an empty string."""
        repeat = f"repeat: {target.job.line(plan, seed)}"
        try:
            if isinstance(shared, Exception):
                raise shared
            result = shared.result(target.job.kernel)
        except Exception as error:
            return f"{type(error).__name__}: {error}\n  {repeat}"
        if self._on_case is not None:
            self._on_case(shared, result)
        if result.failures:
            return "\n  ".join([*result.failures, f"axes {result.axes}", repeat])
        # Cases that pass during shrinking do not count: else none would be missing, and it would not fail.
        if self._shrunk is None:
            target.count(result)
        if not result.vacuous:
            self._real = self._real or (plan, seed)
        return ""
