"""The result of a verification: the report of one Definition and one target, with the worst figures of each output."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field

from flashinfer_trace.harness.plans import Plan
from flashinfer_trace.verdict.compare import Comparison


@dataclass
class PlansRun:
    """The cases that a target has passed, by content: any machine draws them again (see `cases.drawn_again`).

    Attributes:
        counts: how many there were in each of its rounds (see `job.rounds`).
        vacuous: which of all proved nothing, by number.
        sha256: of the plan and the seed of each, and whether it proved something. That of more cases goes on from here.
    """

    counts: list[int] = field(default_factory=list)
    vacuous: list[int] = field(default_factory=list)
    sha256: str = "0" * 64

    def add(self, plan: Plan, seed: int, vacuous: bool) -> None:
        """Counts a case of the last round in."""
        if vacuous:
            self.vacuous.append(sum(self.counts))
        self.counts[-1] += 1
        case = json.dumps([self.sha256, plan, seed, vacuous], sort_keys=True)
        self.sha256 = hashlib.sha256(case.encode()).hexdigest()


@dataclass
class OutputSummary:
    """Worst figures of one output over all real cases. Ratios are error / bound; errors are relative norms."""

    policy: str
    reference_worst: float = 0.0
    reference_error: float = 0.0
    kernel_worst: float = 0.0
    kernel_error: float = 0.0

    def add(self, reference: Comparison, kernel: Comparison | None) -> None:
        """Counts the comparisons of one case in."""
        self.reference_worst = worse(self.reference_worst, reference.ratio)
        self.reference_error = worse(self.reference_error, reference.error)
        if kernel is not None:
            self.kernel_worst = worse(self.kernel_worst, kernel.ratio)
            self.kernel_error = worse(self.kernel_error, kernel.error)


def worse(known: float, new: float) -> float:
    """The larger figure; NaN is worse than any."""
    return max(known, new if math.isfinite(new) else math.inf)


@dataclass
class Report:
    """The findings of `verify` for one Definition and one target.

    Attributes:
        target: ``oracle``, or the kernel's label.
        status: ``passed``, ``failed`` or ``skipped``.
        cases, vacuous: distinct cases that count, and those that proved nothing.
        corners: how many of them the family names (see `Family.corners`).
        real_size: cases at the Definition's own sizes, besides those of its small twin (see `harness.twins`).
        only_twin: whether there are none of these, because the inputs are too large for a CPU.
        message: why it failed (ends with the line that repeats the case) or was skipped.
        plans: the cases by content.
        twin_of: the Definition whose cases these were, if its small twin is the same (see `harness.twins`).
    """

    definition: str
    target: str
    device: str
    status: str = "passed"
    cases: int = 0
    vacuous: int = 0
    corners: int = 0
    real_size: int = 0
    only_twin: bool = False
    seed: int = 0
    seconds: float = 0.0
    message: str = ""
    twin_of: str = ""
    outputs: dict[str, OutputSummary] = field(default_factory=dict)
    plans: PlansRun = field(default_factory=PlansRun)

    @property
    def worst(self) -> float:
        """Largest error / bound of the target over all outputs."""
        summaries = self.outputs.values()
        return max((s.reference_worst if self.target == "oracle" else s.kernel_worst for s in summaries), default=0.0)
