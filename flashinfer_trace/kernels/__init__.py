"""The table of the real kernels: what they are called in which release, what they launch, and what they compute.

`flashinfer_trace.kernels.table` has the form, and a module for each library has the entries. Other packages add kernels
through entry points (`flashinfer_trace.kernels.private`). Nothing here imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.kernels import flashinfer, others, private, sgl_kernel, sglang
from flashinfer_trace.kernels.table import Entry, KernelFacts, Place, facts_of

#: Every entry, sorted by library.
TABLE: tuple[Entry, ...] = (*flashinfer.KERNELS, *sgl_kernel.KERNELS, *sglang.KERNELS, *others.KERNELS)


def in_table(family: str) -> Mapping[str, KernelFacts]:
    """The kernels of a family by label; none of an unknown family."""
    return _by_family().get(family, {})


def family_kernels(family: str) -> dict[str, KernelFacts]:
    """The kernels that can be run for a family, by label: those of the table, and those of other packages."""
    return {**in_table(family), **{one.label: one for one in private.facts_of_family(family)}}


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


def current_label(label: str) -> str:
    """The label of a kernel today, of one that an earlier release had elsewhere; any other is as it is given."""
    path, bracket, rest = label.partition("[")
    return f"{_current_paths().get(path, path)}{bracket}{rest}"


def paths_of(path: str) -> tuple[str, ...]:
    """Where any release has the kernel that today's has at this path."""
    return _places().get(path, (path,))


def library_of(path: str, versions: Mapping[str, str]) -> str | None:
    """The distribution that has a kernel of the table where these are installed; None if that is not known.

    Args:
        path: the kernel's, as today's release has it.
        versions: of what is installed, by distribution.
    """
    for place in _entries().get(path, ()):
        if (version := versions.get(place.distribution)) is not None and place.has(version):
            return place.distribution
    return None


@functools.cache
def distributions() -> tuple[str, ...]:
    """Every distribution that has kernels of the table or further ones, or had some, sorted."""
    known = [place for entry in TABLE for place in entry.places]
    known += [place for facts in private.every_fact() for place in facts.places]
    return tuple(sorted({place.distribution for place in known}))


@functools.cache
def _entries() -> Mapping[str, tuple[Place, ...]]:
    return {entry.path: entry.places for entry in TABLE}


@functools.cache
def _places() -> Mapping[str, tuple[str, ...]]:
    return {one.path: tuple(dict.fromkeys(place.path for place in one.places)) for one in TABLE}


@functools.cache
def _current_paths() -> Mapping[str, str]:
    """Where earlier releases had a kernel -> where today's has it."""
    return {place.path: entry.path for entry in TABLE for place in entry.places[1:] if place.path != entry.path}


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
