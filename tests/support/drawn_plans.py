"""The plans that a family draws."""

from __future__ import annotations

import dataclasses

import hypothesis

from flashinfer_trace.harness.family import PlanRequest


def drawn_plans(family, definition, kernel=None, count=300):
    """Plans for a kernel, or for the reference; the same ones in every run."""
    limits, options = (kernel.limits, kernel.plan_options) if kernel else ({}, None)
    plans = []

    @hypothesis.settings(max_examples=count, database=None, deadline=None, phases=[hypothesis.Phase.generate])
    @hypothesis.seed(5)
    @hypothesis.given(family.plans(PlanRequest(definition, limits, large=False, plan_options=options)))
    def collect(plan):
        plans.append(plan)

    collect()
    return plans


def without_corners(shape):
    """Plans of the shape that are drawn alone."""
    return dataclasses.replace(shape.with_corners(lambda request: ()), many_rows=0)
