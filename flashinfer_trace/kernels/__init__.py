"""The table of the real kernels: what they are called in which release, what they launch, and what they compute.

`flashinfer_trace.kernels.table` has the form, and a module for each library has the entries. Other packages add kernels
through entry points (`flashinfer_trace.kernels.private`). Nothing here imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels import flashinfer, others, private, sgl_kernel, sglang
from flashinfer_trace.kernels.table import Entry, KernelFacts, facts_of

__all__ = ["TABLE", "family_kernels", "in_table", "kernels_of", "launched_by", "named_kernels"]

#: Every entry, sorted by library.
TABLE: tuple[Entry, ...] = (*flashinfer.KERNELS, *sgl_kernel.KERNELS, *sglang.KERNELS, *others.KERNELS)


def in_table(family: str) -> Mapping[str, KernelFacts]:
    """The kernels of a family by label, those that are only named among them; none of an unknown family."""
    return _by_family().get(family, {})


def family_kernels(family: str) -> dict[str, KernelFacts]:
    """The kernels that can be run for a family, by label: those of the table, and those of other packages.

    Raises:
        PrivateKernelsError: another package's kernels cannot be loaded.
    """
    own = {label: one for label, one in in_table(family).items() if not one.named_only}
    return {**own, **{one.label: one for one in private.facts_of_family(family)}}


def kernels_of(family: str, definition: Definition) -> dict[str, KernelFacts]:
    """The kernels that compute a Definition of a family, by label.

    Raises:
        PrivateKernelsError: another package's kernels cannot be loaded.
    """
    return {label: one for label, one in family_kernels(family).items() if one.unsupported(definition) is None}


def named_kernels(family: str, definition: Definition) -> frozenset[str]:
    """The paths by which the tags of a Definition of a family name its kernels, whether or not they have run."""
    return frozenset(
        tag for one in in_table(family).values() if one.unsupported(definition) is None for tag in one.tags
    )


@functools.cache
def launched_by() -> Mapping[str, str]:
    """Kernels -> the one function, named by evidence, that launches them, or that is another name of them."""
    by_name: dict[str, list[str]] = {}
    for entry in TABLE:
        for name in entry.launches:
            by_name.setdefault(name, []).append(entry.path)
    return {name: paths[0] for name, paths in by_name.items() if len(paths) == 1}


@functools.cache
def _by_family() -> Mapping[str, Mapping[str, KernelFacts]]:
    return facts_of(TABLE)
