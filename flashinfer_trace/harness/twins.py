"""Verifies each small twin once: at the sizes of the twin, the Definitions of a family are often identical.

What they differ in, their own sizes, is verified for each of them where that is cheap.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Hashable

from flashinfer_trace.harness.real_size import has_real_size, with_real_size
from flashinfer_trace.harness.verify import Job, Report, verify

__all__ = ["Twins"]


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
