"""Digests of what Definitions promise, and values outside of digests that decide."""

from __future__ import annotations

import dataclasses

import pytest

import flashinfer_trace
from flashinfer_trace.dataset import evidence_run
from flashinfer_trace.dataset.digests import definition_sha256
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.reference import sha256

DEFINITION = flashinfer_trace.load("fused_add_rmsnorm_residual_out_h2048")


def test_the_digest_is_of_what_the_definition_promises() -> None:
    original = definition_sha256(DEFINITION)
    first, second = DEFINITION.inputs.values(), DEFINITION.outputs.values()
    other_dtype = {one.name: dataclasses.replace(one, dtype="float16") for one in second}
    reordered = {one.name: one for one in reversed(list(first))}
    changes = [
        {"name": "other"},
        {"reference": DEFINITION.reference + "# other"},
        {"op_type": "other"},
        {"constraints": ("batch_size >= 0",)},
        {"outputs": other_dtype},
        {"inputs": reordered},
        {"axes": {name: dataclasses.replace(axis, value=7) for name, axis in DEFINITION.axes.items()}},
    ]
    different = {definition_sha256(dataclasses.replace(DEFINITION, **change)) for change in changes}
    assert len(different | {original}) == len(changes) + 1
    assert definition_sha256(dataclasses.replace(DEFINITION, description="x", tags=("y",))) == original
    reworded = DEFINITION.reference.replace('"""Residual', '"""Other\nwords of residual')
    assert reworded != DEFINITION.reference
    assert definition_sha256(dataclasses.replace(DEFINITION, reference=reworded)) == original
    assert definition_sha256(Definition.from_dict(DEFINITION.to_dict())) == original


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            '"""A."""\ndef run(x):\n    """B."""\n    return x\n',
            '"""C."""\ndef run(x):\n    """D."""\n    return x\n',
            True,
        ),
        ('def run(x):\n    """A."""; return x\n', 'def run(x):\n    """A."""; return -x\n', False),
        ('def run(x): """A."""; return x\n', 'def run(x): """B."""; return x\n', False),
        ('"""A.\f\n"""\nTWO = 2\n', '"""A.\f\n"""\nTWO = 3\n', False),
        ('"""A.\r"""\nTWO = 2\n', '"""A.\r"""\nTWO = 3\n', False),
        ('"""A."""\nTEXT = """\n"""\nTWO = 2\n', '"""A."""\nTEXT = """\n"""\nTWO = 3\n', False),
        ("not Python", "not Python either", False),
    ],
)
def test_only_docstrings_of_a_reference_change_no_digest(one: str, other: str, same: bool) -> None:
    assert (sha256(one) == sha256(other)) == same


def test_what_judges_outside_of_the_digest_is_as_it_was() -> None:
    """These values decide what passes, and no digest changes with them: whoever changes one records all runs again."""
    assert (evidence_run.REQUIRED_CASES, evidence_run.SEED) == (50, 0)
