"""Harness records, one module per op_type. Imported only by code that verifies references or makes inputs."""

from __future__ import annotations

import functools
import importlib

from flashinfer_trace.dataset import find_root
from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.family import Family, FamilyError
from flashinfer_trace.naming import family_name, load_naming

__all__ = ["FamilyError", "all_families", "families_of_op_type", "family_of"]


@functools.cache
def families_of_op_type(op_type: str) -> dict[str, Family]:
    """Records of one op_type by family name; empty if the op_type has no module.

    Raises:
        FamilyError: the module has no tuple ``FAMILIES`` of records of its op_type, or two records have the same name.
    """
    path = f"{__name__}.{op_type}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return {}
    families = getattr(module, "FAMILIES", None)
    if not isinstance(families, tuple) or not all(isinstance(f, Family) and f.op_type == op_type for f in families):
        raise FamilyError(f"{path} must define FAMILIES, a tuple of Family records with op_type={op_type!r}")
    records = {family.name: family for family in families}
    if len(records) < len(families):
        raise FamilyError(f"{path}: FAMILIES has two records with the same name: {[f.name for f in families]}")
    return records


def family_of(definition: Definition) -> Family:
    """The record of a Definition's family, by the naming conventions of the root that contains the Definition.

    Raises:
        FamilyError: schema/naming.json has no family for that name, the family has no record, or the record names
            something that the Definition does not have.
    """
    name = family_name(definition, load_naming(definition.root or find_root()))
    if name is None:
        raise FamilyError(
            f"{definition.name}: no family in schema/naming.json matches this name; add its pattern there"
        )
    families = families_of_op_type(definition.op_type)
    if name not in families:
        raise FamilyError(f"{definition.name}: {__name__}.{definition.op_type} has no record of family {name}")
    family = families[name]
    family.check(definition)
    for kernel in family.kernels_of(definition):
        family.check(definition, kernel)
    return family


def all_families() -> list[Family]:
    """Every record, in order of op_type and name; an entry of schema/naming.json without one is an error.

    Raises:
        FamilyError: an entry has no record.
    """
    records = []
    for name, entry in load_naming(find_root()).families.items():
        family = families_of_op_type(entry.op_type).get(name)
        if family is None:
            raise FamilyError(f"family {name}: {__name__}.{entry.op_type} has no record of it")
        records.append(family)
    return sorted(records, key=lambda family: (family.op_type, family.name))
