"""The small twin of a Definition, and the plans that its family draws."""

from __future__ import annotations

import dataclasses

import hypothesis

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.verify import prepare


def small_twin(name):
    """(family, twin of a CPU) of a Definition."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    return family, prepare(definition, family, "cpu", full=False)


def drawn_plans(family, definition, kernel=None, count=300):
    """Plans for a kernel, or for the reference; the same ones in every run."""
    limits, options = (kernel.limits, kernel.plan_options) if kernel else ({}, None)
    return drawn(family.plans(PlanRequest(definition, limits, large=False, plan_options=options)), count)


def drawn(strategy, count=300, seed=5):
    """Plans that hypothesis draws; the same in every run."""
    found = []

    @hypothesis.settings(max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(seed)
    @hypothesis.given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


def without_corners(shape):
    """Plans of the shape that are drawn alone."""
    return dataclasses.replace(shape.with_corners(lambda request: ()), many_rows=0)
