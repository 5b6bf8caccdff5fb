"""Norms: tests distinguish the families that differ only by their epsilon."""

from __future__ import annotations

import pytest

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.case import evaluate, reference_outputs
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import prepare


def twin(name):
    definition = flashinfer_trace.load(name)
    return prepare(definition, family_of(definition), "cpu", full=False)


@pytest.mark.parametrize(
    "names",
    [
        ("rmsnorm_h4096", "rmsnorm_h4096_eps1e6"),
        ("fused_add_rmsnorm_h4096", "fused_add_rmsnorm_h2048"),
        ("fused_add_rmsnorm_residual_out_h4096", "fused_add_rmsnorm_residual_out_h4096_eps1e5"),
        ("layernorm_h128", "layernorm_h4096_eps1e5"),
    ],
    ids=lambda names: names[0],
)
def test_the_other_epsilon_is_rejected_where_it_matters(names):
    definitions = {name: twin(name) for name in names}
    for name, definition in definitions.items():
        record = family_of(definition)
        plan = {**record.plan_for_axes(definition, {"batch_size": 5}, Draws(0, "cpu")), "values": "tiny"}
        inputs = record.inputs(definition, plan, 3, "cpu")
        expected = record.oracle(definition, inputs)
        for other, with_epsilon in definitions.items():
            outputs = reference_outputs(with_epsilon, inputs, 3)
            passed = evaluate(record.policies(), outputs, expected)["output"].passed
            assert passed == (other == name)
