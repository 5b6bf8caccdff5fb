"""Every Definition's reference against its family's float64 oracle: its small twin, and itself where that is cheap."""

from __future__ import annotations

import pytest

import flashinfer_trace
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.harness.real_size import has_real_size
from flashinfer_trace.harness.twins import Twins
from flashinfer_trace.harness.verify import Job

TWINS = Twins()
DEFINITIONS = {definition.name: definition for definition in flashinfer_trace.definitions()}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_reference_meets_the_oracle(name):
    definition = DEFINITIONS[name]
    report = TWINS.verify(Job(definition, family_of(definition)), examples=15, seed=1)
    assert report.status == "passed", report.message
    assert report.cases >= 15
    assert report.real_size == has_real_size(definition), "the case at the Definition's own sizes proves nothing"


def test_every_family_of_the_naming_data_has_a_record_and_a_definition():
    families = {family.name for family in all_families()}
    assert families == {family_of(definition).name for definition in DEFINITIONS.values()}
