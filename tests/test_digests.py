"""Digests of contracts, and values outside of digests that decide."""

from __future__ import annotations

import dataclasses

import flashinfer_trace
from flashinfer_trace.dataset import evidence_run
from flashinfer_trace.dataset.digests import contract_sha256
from flashinfer_trace.format.definition import Definition

DEFINITION = flashinfer_trace.load("fused_add_rmsnorm_residual_out_h2048")


def test_the_contract_is_what_the_definition_promises() -> None:
    original = contract_sha256(DEFINITION)
    first, second = DEFINITION.inputs.values(), DEFINITION.outputs.values()
    other_dtype = {one.name: dataclasses.replace(one, dtype="float16") for one in second}
    reordered = {one.name: one for one in reversed(list(first))}
    changes = [
        {"name": "other"},
        {"op_type": "other"},
        {"constraints": ("batch_size >= 0",)},
        {"outputs": other_dtype},
        {"inputs": reordered},
        {"axes": {name: dataclasses.replace(axis, value=7) for name, axis in DEFINITION.axes.items()}},
    ]
    different = {contract_sha256(dataclasses.replace(DEFINITION, **change)) for change in changes}
    assert len(different | {original}) == len(changes) + 1
    assert contract_sha256(dataclasses.replace(DEFINITION, description="x", tags=("y",), reference="z")) == original
    assert contract_sha256(Definition.from_dict(DEFINITION.to_dict())) == original


def test_what_judges_outside_of_the_digest_is_as_it_was() -> None:
    """These values decide what passes, and no digest changes with them: whoever changes one records all runs again."""
    assert (evidence_run.REQUIRED_CASES, evidence_run.SEED) == (50, 0)
