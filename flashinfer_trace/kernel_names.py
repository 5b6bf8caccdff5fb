"""Finds the kernels of a record that a user names: by label, by path, or by the path of a tag. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from flashinfer_trace import dataset
from flashinfer_trace.definition import Definition
from flashinfer_trace.kernel_paths import CALLED, load_kernel_paths, paths_of_tags

__all__ = ["kernels_named", "no_kernel_named"]


class _Kernel(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def variant(self) -> str: ...

    @property
    def label(self) -> str: ...


AnyKernel = TypeVar("AnyKernel", bound=_Kernel)


def kernels_named(name: str, kernels: Iterable[AnyKernel], root: Path) -> list[AnyKernel]:
    """The kernels that a name stands for: every variant if it is the path of several.

    Args:
        name: a label, a path, or the path of a tag, which may be that of a function that calls an op.
        kernels: among which it is looked up.
        root: of the dataset.

    Raises:
        KernelPathsError: schema/kernel_paths.json is unusable.
    """
    kernels = list(kernels)
    exact = [one for one in kernels if one.label == name]  # a label may also be the path of other variants
    return exact or [one for one in kernels if name in _names(one, root)]


def no_kernel_named(
    name: str, who: str, kernels: Iterable[_Kernel], root: Path, definitions: Sequence[Definition] = ()
) -> str:
    """The message about a name that stands for no kernel, with the nearest ones.

    Args:
        name, kernels, root: as `kernels_named` takes them.
        who: has these kernels: the subject of the sentence, with its verb.
        definitions: whose tags may name a kernel that nobody ran.
    """
    every = list(kernels)
    labels = list(dict.fromkeys(one.label for one in every))
    if any(f"{CALLED}:{name}" in one.tags for one in definitions):
        why = f"the tag {CALLED}:{name} says that libraries or models call it, but it has not been run here"
        return f"{who} no kernel {name!r} that can be run: {why}; {_there_are(labels)}"
    known = dict.fromkeys(known for one in every for known in sorted(_names(one, root)))
    return f"{who} no kernel {name!r}; {_closest(name, list(known)) or _there_are(labels)}"


def _names(kernel: _Kernel, root: Path) -> set[str]:
    return {kernel.label, kernel.path, *paths_of_tags(load_kernel_paths(root), kernel)}


def _there_are(labels: Sequence[str]) -> str:
    return f"there {'is' if len(labels) == 1 else 'are'} {', '.join(labels) or 'none'}"


def _closest(name: str, known: Sequence[str]) -> str:
    """A question that suggests the closest names; a function may be given without its module."""
    bare = {one: _function(one) for one in known}
    alike = difflib.get_close_matches(_function(name), set(bare.values()), n=3, cutoff=0.6)
    found = [one for part in alike for one, function in bare.items() if function == part]
    return f"did you mean {' or '.join(found[:3])}?" if found else dataset.closest(name, known)


def _function(path: str) -> str:
    """The last part of a path, without a variant."""
    return re.sub(r"\[.*", "", path).rpartition(".")[2]
