"""Tags that name kernels: which of them ran, and which exist at all.

A tag ``fi_api:``, ``sgl_api:`` or ``triton_api:`` names a kernel of the family's record that ran for the Definition, on
whatever GPU: its evidence has a run of it that fits. Every other kernel that a library or a model calls for the
function is ``called_as:``. One that does not take the Definition's sizes, according to the record, is not named at all.
The state follows from the record and the evidence, so that `flashinfer-trace embed` sets the namespace.

``schema/kernel_paths.json`` lists what exists in the pinned packages. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.json_source import JsonSourceError, load_object
from flashinfer_trace.json_values import strings
from flashinfer_trace.ledger import proofs
from flashinfer_trace.naming import Naming, family_name, load_naming, ordered
from flashinfer_trace.records import KernelFacts, Records, load_records

__all__ = [
    "CALLED",
    "KINDS",
    "RUN",
    "Claimable",
    "HasPath",
    "KernelPaths",
    "KernelPathsError",
    "claimable",
    "claimable_of",
    "kernel_paths_path",
    "load_kernel_paths",
    "paths_of_tags",
]

#: Namespace of a kernel that runs -> how the paths begin for which `flashinfer-trace embed` chooses it.
RUN = {
    "fi_api": ("flashinfer.",),
    "sgl_api": ("sgl_kernel.", "sglang.jit_kernel."),
    "triton_api": ("sglang.srt.", "triton_kernels."),
}
#: Namespace of a kernel that nobody ran for the Definition.
CALLED = "called_as"
KINDS = (*RUN, CALLED)


class HasPath(Protocol):
    """A kernel of a record, or a run of one."""

    @property
    def path(self) -> str: ...

    @property
    def variant(self) -> str: ...


class KernelPathsError(ValueError):
    """schema/kernel_paths.json is missing or malformed. The message says why."""


@dataclass(frozen=True)
class KernelPaths:
    """What exists in the pinned packages.

    Attributes:
        versions: package -> distribution and version.
        paths: dotted paths of functions and classes.
        ops: ``torch.ops`` path of an op -> the exported functions that call it.
    """

    versions: Mapping[str, str]
    paths: frozenset[str]
    ops: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Claimable:
    """What the tags of one Definition may say of kernels, whose paths are as tags write them.

    Attributes:
        proven: they ran for it.
        refused: its family's record has them, but says that they do not compute it, alone or in a pipeline.
    """

    proven: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def tags(self, paths: Iterable[str]) -> set[str]:
        """The tag of each kernel, in the namespace of its library if it ran, else `CALLED`; none of refused ones."""
        return {self._tag(path) for path in paths if path not in self.refused}

    def retagged(self, tags: list[str], naming: Naming) -> list[str]:
        """Tags with each kernel in the namespace that its state demands; unchanged, also in order, if all are."""
        changed = [new for tag in tags for new in self._retagged(tag)]
        return tags if changed == tags else ordered(changed, naming)

    def _retagged(self, tag: str) -> set[str]:
        namespace, _, path = tag.partition(":")
        return {tag} if namespace not in KINDS or (path in self.proven and namespace in RUN) else self.tags([path])

    def _tag(self, path: str) -> str:
        fitting = [name for name, beginnings in RUN.items() if path in self.proven and path.startswith(beginnings)]
        return f"{(*fitting, CALLED)[0]}:{path}"


def claimable(root: Path, data: Mapping[str, Any]) -> Claimable:
    """What the tags of a Definition may say of kernels, by its JSON, at a dataset root.

    Raises:
        KernelPathsError, RecordsError, NamingError: a file under schema/ is unusable.
        LedgerError: its evidence is unusable.
    """
    family, known, records = family_name(data, load_naming(root)), load_kernel_paths(root), load_records(root)
    try:
        ran = {entry.kernel_label for entry in proofs(root, Definition.from_dict(dict(data)))}
    except InputError:  # validation says what is wrong
        ran = set()
    return claimable_of(known, records, family, str(data.get("name")), ran)


def claimable_of(known: KernelPaths, records: Records, family: str | None, name: str, ran: Container[str]) -> Claimable:
    """What the tags of a Definition may say of kernels.

    Args:
        known, records: those of the dataset.
        family, name: of the Definition.
        ran: the labels of the kernels whose evidence fits it.
    """
    parts: dict[str, list[KernelFacts]] = {"ran": [], "others": [], "refused": []}
    for label, kernel in records.families.get(family or "", {}).items():
        state = "refused" if name in kernel.unsupported else "ran" if label in ran else "others"
        parts[state].append(kernel)
    proven, others, refused = (_paths(known, kernels) for kernels in parts.values())
    return Claimable(proven, refused - proven - others)


def _paths(known: KernelPaths, kernels: Iterable[HasPath]) -> frozenset[str]:
    return frozenset(path for kernel in kernels for path in paths_of_tags(known, kernel))


def paths_of_tags(known: KernelPaths, kernel: HasPath) -> set[str]:
    """The paths by which tags name one kernel, on whatever GPU it runs.

    An op stands for the functions that call it; a pipeline, for the functions of sgl-kernel that its variant lists.
    """
    found = set(known.ops.get(kernel.path, (kernel.path,)))
    if kernel.variant.startswith("pipeline"):
        parts = {f"sgl_kernel.{word}" for word in re.findall(r"\w+", kernel.variant.partition(":")[2])}
        found |= parts & known.paths
    return found


def kernel_paths_path(root: Path) -> Path:
    """Where the paths of a dataset lie."""
    return root / "schema" / "kernel_paths.json"


def load_kernel_paths(root: Path) -> KernelPaths:
    """Reads ``schema/kernel_paths.json`` under a dataset root (cached until the file changes).

    Raises:
        KernelPathsError: it is missing, not JSON, or malformed.
    """
    path = kernel_paths_path(Path(root))
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise KernelPathsError(f"{path}: cannot be read ({error.strerror}); restore it from version control") from None


@functools.lru_cache(maxsize=8)
def _load(path: Path, _modified: int) -> KernelPaths:
    try:
        data = load_object(path)
        return KernelPaths(
            versions={name: f"{one['distribution']} {one['version']}" for name, one in data["packages"].items()},
            paths=frozenset(f"{module}.{name}" for module, names in data["modules"].items() for name in strings(names)),
            ops={op: strings(functions) for op, functions in data["ops"].items()},
        )
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        raise KernelPathsError(f"{path}: malformed ({error!r}); see schema/kernel_paths.schema.json") from None
