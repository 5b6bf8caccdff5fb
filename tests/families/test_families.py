"""The records of all op_types: a module with none, or with wrong ones, raises an error that names it."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest

import flashinfer_trace
from flashinfer_trace import families
from flashinfer_trace.families import FamilyError, families_of_op_type, family_of
from flashinfer_trace.families.rmsnorm import FAMILIES
from flashinfer_trace.harness.verify import Job


@pytest.fixture
def module(monkeypatch):
    """An empty module of the op_type ``toy``."""
    module = ModuleType("flashinfer_trace.families.toy")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(families, "families_of_op_type", families_of_op_type.__wrapped__)
    return module


TOY = dataclasses.replace(FAMILIES[0], op_type="toy")


@pytest.mark.parametrize("records", [None, [TOY], (TOY, "rmsnorm"), (FAMILIES[0],)])
def test_a_module_without_records_of_its_op_type_is_named(module, records):
    if records is not None:
        module.FAMILIES = records
    with pytest.raises(
        FamilyError, match=r"families\.toy must define FAMILIES, a tuple of Family records with op_type"
    ):
        families.families_of_op_type("toy")


def test_two_records_of_one_name_are_named(module):
    module.FAMILIES = (TOY, TOY)
    with pytest.raises(FamilyError, match=r"families\.toy: FAMILIES has two records with the same name"):
        families.families_of_op_type("toy")


def test_an_op_type_without_a_module_has_no_records():
    assert families_of_op_type("no_such_op_type") == {}


def test_a_definition_without_a_record_is_named(monkeypatch):
    definition = flashinfer_trace.load("rmsnorm_h512")
    monkeypatch.setattr(families, "families_of_op_type", lambda op_type: {})
    with pytest.raises(FamilyError, match=r"rmsnorm_h512: flashinfer_trace\.families\.rmsnorm has no record of family"):
        family_of(definition)
    with pytest.raises(FamilyError, match="has no record of it"):
        families.all_families()


def test_every_family_names_corners():
    jobs = {family_of(one).name: Job(one, family_of(one)) for one in flashinfer_trace.definitions()}
    assert not [name for name, job in jobs.items() if not job.corners]


def test_every_family_has_corners_on_a_gpu_too():
    """Where one of its kernels runs on Hopper: those that this kernel takes."""
    without = set()
    for definition in flashinfer_trace.definitions():
        family = family_of(definition)
        kernels = [kernel for kernel in family.kernels_of(definition) if kernel.unavailable((9, 0)) is None]
        if kernels and not any(Job(definition, family, kernel, "cuda").corners for kernel in kernels):
            without.add(family.name)
    assert not without
