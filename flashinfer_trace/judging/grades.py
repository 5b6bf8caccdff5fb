"""By what a submission is judged: the reference's bounds, and those stated for each known kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashinfer_trace.harness.case import evaluate, unrelated, vacuity
from flashinfer_trace.harness.family import Inputs, Kernel, Outputs
from flashinfer_trace.harness.plans import NO_LIMIT
from flashinfer_trace.harness.verify import Job
from flashinfer_trace.judging.verdict import Failure, OutputFigures
from flashinfer_trace.verdict.compare import Comparison, Expected, Policy
from flashinfer_trace.verdict.errors import RowSigns
from flashinfer_trace.verdict.pooled import Pool

#: The label of the reference's own standard.
REFERENCE = "the reference"


@dataclass
class Standard:
    """The bounds of the reference or of a kernel, and how a submission did under them.

    Attributes:
        kernels: those that have these bounds, by their number in the family.
        elsewhere: policies of the reference, for inputs that the kernel never met, for which it does not vouch.
        cases, vacuous: of those that it passed, how many could have failed, and how many could not.
        pool: what is added up over all cases.
        signs: of each output, how its errors lean over all cases.
    """

    label: str
    policies: Mapping[str, Policy]
    kernels: dict[int, str] = field(default_factory=dict)
    elsewhere: Mapping[str, Policy] = field(default_factory=dict)
    vouches_for: Callable[[Inputs], bool] | None = None
    cases: int = 0
    vacuous: int = 0
    figures: dict[str, OutputFigures] = field(default_factory=dict)
    pool: Pool = field(default_factory=Pool)
    signs: dict[str, RowSigns] = field(default_factory=dict)

    def failure(self, job: Job, inputs: Inputs, outputs: Outputs, expected: Mapping[str, Expected]) -> Failure | None:
        """How outputs fail this standard; None if they meet it, which is then counted."""
        policies = self.policies if self.vouches_for is None or self.vouches_for(inputs) else self.elsewhere
        compared = evaluate(policies, outputs, expected)
        wrong = {name: comparison for name, comparison in compared.items() if not comparison.passed}
        if wrong:
            return self._worst(wrong, policies)
        lines = unrelated("outputs", job.family, job.sized, inputs, outputs, compared)
        if lines:
            return Failure("relation", "; ".join(lines), self.label, ratio=float("inf"))
        if vacuity(job.sized, expected, policies):
            self.vacuous += 1
        else:
            self.cases += 1
            self._count(compared)
            for name, want in expected.items():
                self.signs.setdefault(name, RowSigns()).add(policies[name], outputs[name], want)
        return None

    def _worst(self, wrong: Mapping[str, Comparison], policies: Mapping[str, Policy]) -> Failure:
        name = max(wrong, key=lambda one: wrong[one].ratio)
        worst = wrong[name]
        return Failure(
            "values",
            f"output {name}: {worst}",
            self.label,
            name,
            *(worst.index, worst.actual, worst.expected, worst.bound, worst.ratio),
            reason=policies[name].reason,
        )

    def of_all_cases(self) -> Failure | None:
        """Failures that all cases together show and no single case shows."""
        worst = self.pool.worst()
        found = {name: signs.comparison() for name, signs in self.signs.items()} | dict([worst] if worst else [])
        wrong = {name: one for name, one in found.items() if one is not None and not one.passed}
        return self._worst(wrong, self.policies) if wrong else None

    def _count(self, compared: Mapping[str, Comparison]) -> None:
        self.pool.add(compared)
        for name, comparison in compared.items():
            figures = self.figures.setdefault(name, OutputFigures(self.policies[name].reason))
            figures.worst = max(figures.worst, comparison.ratio)
            figures.error = max(figures.error, comparison.error)


def unmet(left: list[Standard], failures: Sequence[Failure | None]) -> Failure | None:
    """Takes the standards that were failed from `left`; the closest failure instead if none would be left."""
    wrong = [one for one in failures if one is not None]
    if len(wrong) == len(left):
        return min(wrong, key=lambda one: math.inf if math.isnan(one.ratio) else one.ratio)
    left[:] = [one for one, failed in zip(left, failures, strict=True) if failed is None]
    return None


@dataclass(frozen=True)
class JudgedInputs:
    """Inputs of one kind (in words in `limited_to`, empty for all valid ones), and the kernels whose standards
    apply."""

    job: Job
    kernels: Sequence[Kernel]
    limited_to: str = ""


def standards(judged: JudgedInputs) -> list[Standard]:
    """The standards of one kind of inputs, the reference's first. Kernels that have the same policies share one."""
    own = judged.job.family.policies()
    found = [Standard(REFERENCE, own)]
    for number, kernel in enumerate(judged.kernels):
        policies, vouches = judged.job.family.policies(kernel), getattr(kernel.plan_options, "vouches_for", None)
        same = [one for one in found if vouches is one.vouches_for is None and _are(policies, one.policies)]
        if not same:
            same = [Standard(kernel.label, policies, {}, own, vouches)]
            found += same
        same[0].kernels[number] = kernel.label
    return found


def _are(first: Mapping[str, Policy], second: Mapping[str, Policy]) -> bool:
    return first.keys() == second.keys() and all(first[name] is second[name] for name in first)


def kinds_of_inputs(job: Job) -> list[JudgedInputs]:
    """All valid inputs, by every standard; then, for each way in which known kernels limit theirs, those inputs; and
    contiguous ones, which programs other than servers have."""
    kernels = job.family.kernels_of(job.definition)
    found = [JudgedInputs(job, kernels)]
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        drawing = kernel.limits, kernel.plan_options
        alike = [group for group in groups if (group[0].limits, group[0].plan_options) == drawing]
        if alike:
            alike[0].append(kernel)
        elif kernel.limits or kernel.plan_options is not None:
            groups.append([kernel])
    found += [limited(job, group) for group in groups]
    if job.family.strided_of(job.definition):
        dense = dataclasses.replace(job, family=dataclasses.replace(job.family, strided=()))
        found.append(JudgedInputs(dense, kernels, "contiguous inputs"))
    return found


def limited(job: Job, kernels: Sequence[Kernel]) -> JudgedInputs:
    """The inputs that these kernels take; all of them limit theirs alike."""
    first = kernels[0]
    parts = [
        f"{axis} {low} or more" if high >= NO_LIMIT else f"{axis} {low} to {high}"
        for axis, (low, high) in first.limits.items()
    ]
    if first.plan_options is not None:
        parts += _in_words(first.plan_options)
    text = f"{', '.join(parts)}: what {first.label} takes" if parts else ""
    return JudgedInputs(Job(job.definition, job.family, first, job.device, job.full), kernels, text)


def _in_words(options: Any) -> list[str]:
    values = {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}
    usual = {one.name: one.default for one in dataclasses.fields(options)}
    changed = {name: value for name, value in values.items() if value != usual[name]}
    words = {True: "only with {}", False: "without {}"}
    return [
        words[value].format(name.replace("_", " ")) if isinstance(value, bool) else f"{name.replace('_', ' ')} {value}"
        for name, value in changed.items()
    ]
