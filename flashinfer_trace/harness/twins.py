"""Verifies each small twin once: at the sizes of the twin, the Definitions of a family are often identical.

Their own sizes, in which they differ, are verified for each of them on a CPU where a case takes about a second: a
reference that looks at the first 4096 of 7168 features is right at every size up to 4096.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.plans import Plan, input_bytes
from flashinfer_trace.harness.verify import Job, Report, verify

#: The memory of inputs up to which a case at a Definition's own sizes takes at most about a second.
REAL_BYTES = 72 * 2**20

#: How many of the family's corners, the first ones, are run at a Definition's own sizes too.
REAL_CORNERS = 3


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
    shows (`flashinfer-trace verify` says so). `real_size` is 0 where the served case is vacuous, with another seed too.
    """
    if report.status != "passed" or not has_real_size(job.definition):
        return report
    full = dataclasses.replace(job, full=True)
    for number, (plan, seed) in enumerate(real_cases(full, report.seed, corners)):
        real = verify(full, plan=plan, seed=seed)
        if number == 0 and real.vacuous:  # as of a request whose draft tokens are all rejected
            real = verify(full, plan=plan, seed=seed + 1)
        cases, seconds = report.real_size + real.cases, report.seconds + real.seconds
        report = dataclasses.replace(report, status=real.status, message=real.message, real_size=cases, seconds=seconds)
        if report.status != "passed" or not report.real_size:
            break
    return report


class Twins:
    """Verifies jobs, and remembers the report of each distinct twin.

    Two jobs have the same twin if everything that a case depends on is equal: the family, the target, the device, the
    reference with the twin's constants, axes, inputs, outputs and constraints. Name, description and tags do not count.
    """

    def __init__(self) -> None:
        self._reports: dict[Hashable, Report] = {}
        self._cornered: set[Hashable] = set()

    def verify(self, job: Job, *, examples: int, seed: int) -> Report:
        """Like `harness.verify.verify`, with a case at the Definition's own sizes where that takes about a second.

        The first Definition of each twin that has one has some of the family's corners at its own sizes as well.
        The report carries the name of the job's Definition. If the twin was verified before, `twin_of` names the
        Definition that was verified, the time is that of the Definition's own cases, and a failure's message is
        repeated, because its command line still reproduces the case.
        """
        key = (twin_key(job), examples, seed)
        known = self._reports.get(key)
        if known is None:
            report = self._reports[key] = verify(job, examples=examples, seed=seed)
        else:
            report = dataclasses.replace(known, definition=job.definition.name, twin_of=known.definition, seconds=0.0)
        corners = key not in self._cornered and has_real_size(job.definition)
        if corners:
            self._cornered.add(key)
        return with_real_size(job, report, corners)


def twin_key(job: Job) -> Hashable:
    """Everything that the cases of a job depend on."""
    data = {key: value for key, value in job.sized.to_dict().items() if key not in ("name", "description", "tags")}
    for section in ("axes", "inputs", "outputs"):
        data[section] = [(name, {**spec, "description": ""}) for name, spec in data[section].items()]
    return job.family.name, job.target, job.device, json.dumps(data)
