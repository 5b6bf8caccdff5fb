"""Definitions whose reference is changed, and thereby wrong."""

from __future__ import annotations

import dataclasses

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.case import reference_outputs
from flashinfer_trace.harness.family import Kernel


def changed(name: str, old: str, new: str) -> Definition:
    """The Definition with a change of its reference."""
    definition = flashinfer_trace.load(name)
    assert definition.reference.count(old) == 1, f"{name} has {old!r} {definition.reference.count(old)} times"
    return dataclasses.replace(definition, reference=definition.reference.replace(old, new))


def wrong_kernel(definition: Definition, old: str, new: str, label: str = "") -> Kernel:
    """A kernel that is judged as a real one is (by default the family's first), and computes the changed reference."""
    assert definition.reference.count(old) == 1, (
        f"{definition.name} has {old!r} {definition.reference.count(old)} times"
    )
    kernels = family_of(definition).kernels_of(definition)
    kernel = next(one for one in kernels if not label or one.label == label)

    def call(sized, inputs, outputs):
        wrong = dataclasses.replace(sized, reference=sized.reference.replace(old, new))
        return reference_outputs(wrong, inputs, 0)

    return dataclasses.replace(kernel, call=call, in_place=(), seeded=None)
