"""Kernels and families of other packages, which entry points name.

- Group ``flashinfer_trace.kernels``: an object with ``KERNELS``, a mapping from the name of a known family to a tuple
  of further `flashinfer_trace.harness.family.Kernel`.
- Group ``flashinfer_trace.families``: a module with ``FAMILIES``, a tuple of `flashinfer_trace.harness.family.Family`.

Their kernels have facts of their own, as the table lacks them (`flashinfer_trace.harness.family.private_kernel`).
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from typing import Any

from flashinfer_trace.kernels.table import KernelFacts


class PrivateKernelsError(ValueError):
    """The kernels or families of another package cannot be used. The message names its entry point."""


@functools.cache
def families() -> tuple[tuple[str, Any], ...]:
    """(where, record) of every family of other packages.

    Raises:
        PrivateKernelsError: an entry point cannot be loaded, or has no tuple ``FAMILIES``.
    """
    found = []
    for where, module in _loaded("flashinfer_trace.families"):
        records = getattr(module, "FAMILIES", None)
        if not isinstance(records, tuple):
            raise PrivateKernelsError(f"{where}: must define FAMILIES, a tuple of Family records")
        found += [(where, record) for record in records]
    return tuple(found)


@functools.cache
def kernels() -> tuple[tuple[str, str, Any], ...]:
    """(where, family, kernel) of every further kernel of a known family.

    Raises:
        PrivateKernelsError: an entry point cannot be loaded, or has no mapping ``KERNELS``.
    """
    found = []
    for where, module in _loaded("flashinfer_trace.kernels"):
        try:
            found += [(where, family, one) for family, each in module.KERNELS.items() for one in each]
        except (AttributeError, TypeError):
            text = "must define KERNELS, a mapping from names of families to tuples of Kernel"
            raise PrivateKernelsError(f"{where}: {text}") from None
    return tuple(found)


@functools.cache
def facts_of_family(family: str) -> tuple[KernelFacts, ...]:
    """The facts of the kernels that other packages have for a family.

    Raises:
        PrivateKernelsError: an entry point cannot be loaded, or a kernel has no facts.
    """
    own = [(where, one) for where, record in families() if record.name == family for one in record.kernels]
    own += [(where, one) for where, name, one in kernels() if name == family]
    if lacking := [f"{where}: the kernel {one.path}" for where, one in own if one.facts is None]:
        raise PrivateKernelsError(f"{lacking[0]} has no facts; make it with flashinfer_trace.harness.family")
    return tuple(one.facts for _, one in own)


def every_fact() -> tuple[KernelFacts, ...]:
    """The facts of all kernels of other packages."""
    names = {record.name for _, record in families()} | {name for _, name, _ in kernels()}
    return tuple(facts for name in sorted(names) for facts in facts_of_family(name))


def _loaded(group: str) -> Iterable[tuple[str, Any]]:
    """(where, what it names) of the entry points of a group, by name."""
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda one: (one.name, one.value)):
        where = f"the entry point {point.name} = {point.value} of {group}"
        try:
            yield where, point.load()
        except Exception as error:  # code of others
            raise PrivateKernelsError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
