"""The reference of each family against its float64 oracle: the small twin, and the Definition where that is cheap.

`flashinfer-trace verify`, which CI runs before the tests, does the same with every Definition and other draws.
"""

from __future__ import annotations

import pytest
from whole_dataset import FAMILIES, MEMBERS

from flashinfer_trace.families import all_families
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.harness.twins import Twins, has_real_size
from flashinfer_trace.harness.verify import Job

#: The Definition of each family with the smallest inputs.
SMALLEST = {name: min(members, key=lambda one: (input_bytes(one), one.name)) for name, members in MEMBERS.items()}


@pytest.mark.parametrize("name", SMALLEST)
def test_reference_meets_the_oracle(name):
    definition = SMALLEST[name]
    report = Twins().verify(Job(definition, FAMILIES[name]), examples=15, seed=1)
    assert report.status == "passed", report.message
    assert report.cases >= 15
    assert (report.real_size > 0) == has_real_size(definition), "the case at the Definition's own sizes proves nothing"


def test_every_family_of_the_naming_data_has_a_record_and_a_definition():
    assert {family.name for family in all_families()} == FAMILIES.keys()
