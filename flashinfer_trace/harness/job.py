"""A verification: a Definition, its family and a kernel, with the plans that cases are drawn from."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, FamilyError, Kernel, Plan, PlanRequest
from flashinfer_trace.harness.plans import many_rows, one_row
from flashinfer_trace.sandbox.worker import ReferenceWorker

#: A kernel's constraints on plans: limits of variable axes, and options.
Drawing = tuple[Mapping[str, tuple[int, int]], object | None]

#: The cases that a kernel has of its own, beyond those that it shares with kernels that take less (`Kernel.common`).
BEYOND = 13

#: How many queries a reference of attention takes at once; this bounds memory only. A twin has the smaller number: its
#: few queries are several blocks.
BLOCK = re.compile(r"^QUERY_BLOCK = 64$", re.MULTILINE)
SMALL_BLOCK = "QUERY_BLOCK = 2"


def prepare(definition: Definition, family: Family, device: str, full: bool) -> Definition:
    """The Definition at the sizes to run: the family's small twin, with small blocks, on a CPU, unless `full`."""
    if full or torch.device(device).type == "cuda":
        return definition
    twin = definition.with_const_axes(family.twin)
    return dataclasses.replace(twin, reference=BLOCK.sub(SMALL_BLOCK, twin.reference))


@dataclass(frozen=True)
class Job:
    """A target to verify, with its device and its sizes.

    Attributes:
        definition: as loaded (real sizes).
        family: its record.
        kernel: compare this kernel too; otherwise the reference against the oracle only.
        device: ``cpu``, ``cuda`` or ``cuda:1``.
        full: real sizes on a CPU too.
        worker: where the reference runs on a CPU; in this process if there is none, and on a GPU.
    """

    definition: Definition
    family: Family
    kernel: Kernel | None = None
    device: str = "cpu"
    full: bool = False
    worker: ReferenceWorker | None = field(default=None, compare=False)

    @functools.cached_property
    def sized(self) -> Definition:
        """The Definition at the sizes to run."""
        return prepare(self.definition, self.family, self.device, self.full)

    @property
    def target(self) -> str:
        """``oracle``, or the kernel's label."""
        return self.kernel.label if self.kernel else "oracle"

    @property
    def large(self) -> bool:
        """Whether cases may have sizes for a GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def plans(self) -> st.SearchStrategy[Plan]:
        """The plans that may be drawn."""
        return self.family.plans(self.request)

    @property
    def corners(self) -> Sequence[Plan]:
        """The plans that run before any is drawn."""
        family, request = self.family, self.request
        return [*family.corners(request), *many_rows(family.plan, request), *one_row(family.plan, request)]

    @property
    def far_plan(self) -> Plan:
        """The plan of the case with offsets beyond 32 bits.

        Raises:
            FamilyError: there is none.
        """
        plan = self.family.far_plan(self.request)
        if plan is None:
            raise FamilyError(
                f"{self.definition.name}: no case with offsets beyond 32 bits: it takes a GPU, and caches or rows that "
                f"may be so many"
            )
        return plan

    @property
    def request(self) -> PlanRequest:
        """The request for its plans."""
        limits, options = self.drawing
        return PlanRequest(self.sized, limits, self.large, options)

    @property
    def drawing(self) -> Drawing:
        """Its kernel's constraints on plans."""
        return (self.kernel.limits, self.kernel.plan_options) if self.kernel else ({}, None)

    @property
    def common(self) -> Drawing | None:
        """The constraints of other kernels that take less and whose cases it shares; None without such kernels."""
        return (self.kernel.limits, self.kernel.common) if self.kernel and self.kernel.common is not None else None

    def line(self, plan: Plan, seed: int) -> str:
        """The command that repeats a case."""
        target = f"--kernel {shlex.quote(self.target)}" if self.kernel else "--against oracle"
        size = " --full" if self.full and self.kernel is None else ""
        text = shlex.quote(json.dumps(plan, separators=(",", ":"), sort_keys=True))
        return (
            f"flashinfer-trace verify {self.definition.name} {target} --device {self.device}{size} "
            f"--plan {text} --seed {seed}"
        )


@dataclass(frozen=True)
class Round:
    """Cases that some jobs share.

    Attributes:
        numbers: of the jobs; cases are drawn for the first one.
        examples: cases that are drawn, in addition to the corners.
    """

    numbers: tuple[int, ...]
    examples: int


def rounds(jobs: Sequence[Job], examples: int) -> list[Round]:
    """The rounds in which jobs are verified. Each job gets at least `examples` cases.

    Jobs whose kernels have the same limits and options of plans share all of their cases. A kernel that takes more than
    others shares those of the others first, and has a few of its own then.
    """
    groups: list[list[int]] = []
    for number, job in enumerate(jobs):
        for group in groups:
            first = jobs[group[0]]
            if (job.drawing, job.common, job.kernel is None) == (first.drawing, first.common, first.kernel is None):
                group.append(number)
                break
        else:
            groups.append([number])
    whole, beyond = [], []
    for group in groups:
        first = jobs[group[0]]
        joining = [number for number, job in enumerate(jobs) if number not in group and job.common == first.drawing]
        if any(first.common == job.drawing for job in jobs):
            beyond.append(Round(tuple(group), min(BEYOND, examples)))
        else:
            whole.append(Round((*group, *joining), examples))
    return [*whole, *beyond]
