"""RMSNorm: the families that differ by their epsilon alone are told apart."""

from __future__ import annotations

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.verify import prepare


def twin(name):
    definition = flashinfer_trace.load(name)
    return prepare(definition, family_of(definition), "cpu", full=False)


@pytest.mark.parametrize("family", ["rmsnorm", "fused_add_rmsnorm"])
def test_the_other_epsilon_is_rejected_where_it_matters(family):
    definitions = {suffix: twin(f"{family}_h4096{suffix}") for suffix in ("", "_eps1e5")}
    plan = {"batch_size": 5, "values": "tiny", "zero_row": False}
    for suffix, definition in definitions.items():
        record = family_of(definition)
        inputs = record.inputs(definition, plan, 3, "cpu")
        expected = record.oracle(definition, inputs)
        for other, with_epsilon in definitions.items():
            outputs = reference_outputs(with_epsilon, inputs, 3)
            passed = evaluate(record.policies(), outputs, expected)["output"].passed
            assert passed == (other == suffix)
