"""The harness records, for tools that need all of them: an unfinished or broken one is an error of one line."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from flashinfer_trace.cli.tasks import error_place, unfinished
from flashinfer_trace.families import FamilyError, all_families, module_of
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.kernels.table import capability_range


def usable_families(names: Sequence[str] = ()) -> dict[str, Family]:
    """Every record, by the name of its family.

    Args:
        names: the families whose records must be finished; all if empty.

    Raises:
        FamilyError: a record cannot be imported, has a `TODO` or lists no kernel. The message names its file.
    """
    try:
        families = {family.name: family for family in all_families()}
    except Exception as error:  # a record is Python code of contributors
        raise FamilyError(error_place(error)) from error
    for family in (families[name] for name in names or families if name in families):
        if todo := unfinished(family):
            raise FamilyError(todo)
        if not family.kernels:
            file = importlib.import_module(f"flashinfer_trace.{module_of(family)}").__file__
            raise FamilyError(f"{file}: the record of {family.name} has no kernel; list the kernels that compute it")
    return families


def capabilities(kernels: Sequence[Kernel]) -> str:
    """The compute capabilities that some of the kernels run on, as `capability_range` writes them."""
    known = [one.known for one in kernels]
    return capability_range(min(one.min_capability for one in known), max(one.max_capability for one in known))
