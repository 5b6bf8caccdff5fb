"""Real kernels whose libraries a test emulates: how these are installed, and on which cases the kernels must pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
from drawn_plans import drawn

import flashinfer_trace
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.case import run_case
from flashinfer_trace.harness.family import Kernel, PlanRequest
from flashinfer_trace.harness.verify import Job, prepare, verify


def install(monkeypatch: pytest.MonkeyPatch, stand_ins: Mapping[str, object]) -> None:
    """Puts objects at dotted paths, in modules that are there or stand in for absent ones, as are their packages."""
    for path, value in stand_ins.items():
        *packages, attribute = path.split(".")
        for end in range(1, len(packages) + 1):
            name, parent = ".".join(packages[:end]), ".".join(packages[: end - 1])
            if not isinstance(sys.modules.get(name), ModuleType):
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
            if parent:
                monkeypatch.setattr(sys.modules[parent], packages[end - 1], sys.modules[name], raising=False)
        monkeypatch.setattr(sys.modules[".".join(packages)], attribute, value, raising=False)


def assert_adapter_passes(name: str, path: str, examples: int = 30, full: bool = False) -> None:
    """Asserts that the kernel at a path, or of a label, passes a verification with so many cases that count."""
    definition = flashinfer_trace.load(name)
    family = family_of(definition)
    (kernel,) = (one for one in family.kernels if path in (one.path, one.label))
    report = verify(Job(definition, family, kernel, full=full), examples=examples)
    assert report.status == "passed", report.message
    assert report.cases >= examples


def assert_plans_pass(definition: Definition, kernel: Kernel, *plans: dict[str, Any]) -> None:
    """Asserts that no case of these plans of the small twin fails."""
    family = family_of(definition)
    small = prepare(definition, family, "cpu", full=False)
    for plan in plans:
        result = run_case(small, family, plan, 5, "cpu", kernel)
        assert not result.failures, f"{kernel.label}, {plan}: {result.failures}"
        assert result.kernel


def assert_kernel_passes(definition: Definition, kernel: Kernel, real: int, as_on_gpu: bool = False) -> None:
    """Asserts that no case of the small twin fails, and that so many of 25 drawn ones prove something.

    Args:
        as_on_gpu: whether the corners are those for a GPU.
    """
    family = family_of(definition)
    small = prepare(definition, family, "cpu", full=False)
    request = PlanRequest(small, kernel.limits, False, kernel.plan_options)
    vacuous: list[bool] = []
    for plan in drawn(family.plans(request), 25, seed=3):
        result = run_case(small, family, plan, 5, "cpu", kernel)
        assert not result.failures and result.kernel
        vacuous.append(bool(result.vacuous))
    corners = PlanRequest(small, kernel.limits, as_on_gpu, kernel.plan_options)
    for number, plan in enumerate(family.corners(corners)):
        result = run_case(small, family, plan, number, "cpu", kernel)
        assert not result.failures, f"{plan}: {result.failures}"
    assert vacuous.count(False) >= real
