"""Harness records, one module per op_type. Imported only by code that verifies references or makes inputs.

Other packages add families, and further kernels of known ones, through entry points
(`flashinfer_trace.kernels.private`).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from flashinfer_trace.dataset.store import find_root
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.harness.family import Family, FamilyError, Kernel
from flashinfer_trace.kernels import private

__all__ = ["FamilyError", "all_families", "families_of_op_type", "family_of", "module_of"]


@functools.cache
def families_of_op_type(op_type: str) -> dict[str, Family]:
    """Records of one op_type by family name; empty if the op_type has no module.

    They are in ``FAMILIES`` of the op_type's module or package, or of a separate module: a submodule of the package, or
    ``<op_type>_<family>.py`` next to the module. Only this function imports such a separate module, so its record can
    build on the other records of the op_type.

    Raises:
        FamilyError: a module has no tuple ``FAMILIES`` of records of its op_type, or two records have the same name.
        PrivateKernelsError: an entry point cannot be used.
    """
    records = _own_families(op_type)
    for where, family in private.families():
        if not isinstance(family, Family):
            raise FamilyError(f"{where}: FAMILIES has {family!r}, which is not a Family record")
        if family.op_type == op_type and records.setdefault(family.name, family) is not family:
            raise FamilyError(f"{where}: FAMILIES has the record {family.name}, a name that is taken")
    for where, name, kernel in private.kernels():
        if name in records:
            if not isinstance(kernel, Kernel):
                raise FamilyError(f"{where}: KERNELS has {kernel!r} for {name}, which is not a Kernel")
            if kernel.label in (one.label for one in records[name].kernels):
                raise FamilyError(f"{where}: the family {name} already has the kernel {kernel.label}")
            records[name] = replace(records[name], kernels=(*records[name].kernels, kernel))
    return records


def _own_families(op_type: str) -> dict[str, Family]:
    own = f"{__name__}.{op_type}"
    try:
        module = importlib.import_module(own)
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
        return {}
    families = getattr(module, "FAMILIES", None)
    if not isinstance(families, tuple) or not all(isinstance(f, Family) and f.op_type == op_type for f in families):
        raise FamilyError(f"{own} must define FAMILIES, a tuple of Family records with op_type={op_type!r}")
    records = {family.name: family for family in families}
    if len(records) < len(families):
        raise FamilyError(f"{own}: FAMILIES has two records with the same name: {[f.name for f in families]}")
    for path in _modules_of_one_family(module, op_type):
        for family in getattr(importlib.import_module(path), "FAMILIES", ()):
            if family.op_type == op_type and records.setdefault(family.name, family) is not family:
                raise FamilyError(f"{path}: FAMILIES has a second record with the name {family.name}")
    return records


def module_of(family: Family) -> str:
    """The module that has a family's record, relative to the package: of several that list it, the innermost."""
    own = importlib.import_module(f"{__name__}.{family.op_type}")
    paths = _modules_of_one_family(own, family.op_type)
    having = [
        path for path in paths if any(each is family for each in getattr(importlib.import_module(path), "FAMILIES", ()))
    ]
    return (having or [own.__name__])[-1].removeprefix("flashinfer_trace.")


def _modules_of_one_family(module: ModuleType, op_type: str) -> Iterator[str]:
    """Dotted paths of the modules that may contain further records, given the module or package of the op_type."""
    for found in pkgutil.iter_modules(__path__):
        if found.name.startswith(f"{op_type}_"):
            yield f"{__name__}.{found.name}"
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        yield f"{module.__name__}.{found.name}"


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
        FamilyError: an entry has no record, or another package has kernels of an unknown family.
    """
    records, entries = [], load_naming(find_root()).families
    for where, name, _ in private.kernels():
        if name not in entries:
            raise FamilyError(f"{where}: KERNELS names the family {name}, which schema/naming.json lacks")
    for name, entry in entries.items():
        family = families_of_op_type(entry.op_type).get(name)
        if family is None:
            raise FamilyError(f"family {name}: {__name__}.{entry.op_type} has no record of it")
        records.append(family)
    return sorted(records, key=lambda family: (family.op_type, family.name))
