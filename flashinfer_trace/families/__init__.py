"""Harness records, one module an op_type. Nothing here is imported before something verifies or makes inputs."""

from __future__ import annotations

import functools
import importlib

from flashinfer_trace.dataset import find_root
from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Family
from flashinfer_trace.naming import family_of as family_name_of
from flashinfer_trace.naming import load_naming

__all__ = ["FamilyError", "all_families", "families_of_op_type", "family_of"]


class FamilyError(LookupError):
    """A Definition that no family record covers. The message says which file lacks the record."""


@functools.cache
def families_of_op_type(op_type: str) -> dict[str, Family]:
    """Records of one op_type by family name; empty if the op_type has no module."""
    try:
        module = importlib.import_module(f"flashinfer_trace.families.{op_type}")
    except ModuleNotFoundError as error:
        if error.name != f"flashinfer_trace.families.{op_type}":
            raise
        return {}
    return {family.name: family for family in module.FAMILIES}


def family_of(definition: Definition) -> Family:
    """The record of a Definition's family, by the naming conventions of the root that the Definition came from.

    Raises:
        FamilyError: schema/naming.json knows no family of that name, or it has no record.
    """
    name = family_name_of(definition, load_naming(definition.root or find_root()))
    if name is None:
        raise FamilyError(f"{definition.name}: no family in schema/naming.json has this name; add its pattern there")
    families = families_of_op_type(definition.op_type)
    if name not in families:
        raise FamilyError(
            f"{definition.name}: flashinfer_trace/families/{definition.op_type}.py has no record of family {name}"
        )
    return families[name]


def all_families() -> list[Family]:
    """Every record, in order of op_type and name; an entry of schema/naming.json without one is an error.

    Raises:
        FamilyError: see above.
    """
    records = []
    for name, entry in load_naming(find_root()).families.items():
        family = families_of_op_type(entry.op_type).get(name)
        if family is None:
            raise FamilyError(f"family {name}: flashinfer_trace/families/{entry.op_type}.py has no record of it")
        records.append(family)
    return sorted(records, key=lambda family: (family.op_type, family.name))
