"""Scalar inputs: cases have several values of each, or a reference with the one built in would be accepted."""

from __future__ import annotations

import pytest
from drawn_plans import drawn_plans
from whole_dataset import FAMILIES, FIRST

from flashinfer_trace.harness.verify import Job

SCALARS = {
    name: [one for one, spec in definition.inputs.items() if spec.shape is None] for name, definition in FIRST.items()
}


@pytest.mark.parametrize("name", [name for name, scalars in SCALARS.items() if scalars])
def test_cases_have_several_values_of_each_scalar(name):
    family, job = FAMILIES[name], Job(FIRST[name], FAMILIES[name])
    values: dict[str, set[float]] = {scalar: set() for scalar in SCALARS[name]}
    for seed, plan in enumerate([*job.corners, *drawn_plans(family, job.sized, count=20)]):
        inputs = family.inputs(job.sized, plan, seed, "cpu")
        for scalar, known in values.items():
            known.add(float(inputs[scalar]))
        if all(len(known) > 1 for known in values.values()):
            return
    pytest.fail(f"{name}: {', '.join(one for one, known in values.items() if len(known) < 2)} never varies")
