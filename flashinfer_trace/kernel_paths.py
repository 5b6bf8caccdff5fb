"""Tags that name kernels: which of them ran, and which exist at all.

A tag ``fi_api:``, ``sgl_api:`` or ``triton_api:`` names a kernel that runs: one of the kernels of the family's record
that a GPU of compute capability `RECORDED_ON` runs, without whose evidence no Definition is verified, or one that needs
another GPU and has evidence from one. Every other kernel that a library or a model calls for the function is
``called_as:``. The state follows from the record and the evidence, so that `flashinfer-trace embed` sets the namespace.

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
from flashinfer_trace.json_source import JsonSourceError, load_object, strings
from flashinfer_trace.ledger import RECORDED_ON, proofs
from flashinfer_trace.naming import Naming, family_name, load_naming, ordered
from flashinfer_trace.records import KernelFacts, load_records

__all__ = [
    "CALLED",
    "KINDS",
    "RUN",
    "HasPath",
    "KernelPaths",
    "KernelPathsError",
    "claimable",
    "kernel_paths_path",
    "load_kernel_paths",
    "paths_of_tags",
    "proven_paths",
    "recorded_elsewhere",
    "tag_of_kernel",
    "with_claims",
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


def claimable(known: KernelPaths, kernels: Iterable[KernelFacts], recorded: Container[str] = ()) -> set[str]:
    """The paths that these kernels of a record prove, as tags write them.

    An op stands for the functions that call it; a pipeline, for the functions of sgl-kernel that its variant lists.

    Args:
        known: what exists.
        kernels: of a record.
        recorded: labels of kernels whose evidence fits, on whatever GPU (see `recorded_elsewhere`).
    """
    ran = (one for one in kernels if one.runs_on(RECORDED_ON) or one.label in recorded)
    return {path for one in ran for path in paths_of_tags(known, one)}


def recorded_elsewhere(root: Path, data: Mapping[str, Any], kernels: Iterable[KernelFacts]) -> set[str]:
    """Labels of the kernels that need another GPU than `RECORDED_ON`, and whose evidence fits a Definition, by its JSON.

    Raises:
        LedgerError, RecordsError, NamingError: see `flashinfer_trace.ledger.proofs`.
    """
    others = {one.label for one in kernels if not one.runs_on(RECORDED_ON)}
    if not others:
        return set()
    try:
        definition = Definition.from_dict(dict(data))
    except InputError:  # validation says what is wrong
        return set()
    return {entry.kernel_label for entry in proofs(root, definition)} & others


def paths_of_tags(known: KernelPaths, kernel: HasPath) -> set[str]:
    """The paths by which tags name one kernel, on whatever GPU it runs (see `claimable`)."""
    found = set(known.ops.get(kernel.path, (kernel.path,)))
    if kernel.variant.startswith("pipeline"):
        parts = {f"sgl_kernel.{word}" for word in re.findall(r"\w+", kernel.variant.partition(":")[2])}
        found |= parts & known.paths
    return found


def with_claims(tags: list[str], proven: set[str], naming: Naming) -> list[str]:
    """The tags with each kernel in the namespace that its state demands; unchanged, also in order, if all are."""
    changed = [_retagged(tag, proven) for tag in tags]
    return tags if changed == tags else ordered(changed, naming)


def _retagged(tag: str, proven: set[str]) -> str:
    namespace, _, path = tag.partition(":")
    if namespace not in KINDS:
        return tag
    return tag if path in proven and namespace in RUN else tag_of_kernel(path, proven)


def tag_of_kernel(path: str, proven: set[str]) -> str:
    """The tag of a kernel: in the namespace of its library if it runs, otherwise `CALLED`."""
    fitting = [name for name, beginnings in RUN.items() if path in proven and path.startswith(beginnings)]
    return f"{(*fitting, CALLED)[0]}:{path}"


def proven_paths(root: Path, data: Mapping[str, Any]) -> set[str]:
    """`claimable` of a Definition by its JSON, at a dataset root.

    Raises:
        KernelPathsError, RecordsError, NamingError: a file under schema/ is unusable.
        LedgerError: the evidence is unusable.
    """
    family, records = family_name(data, load_naming(root)), load_records(root)
    kernels = records.kernels_of(family, str(data.get("name"))) if family else {}
    recorded = recorded_elsewhere(root, data, kernels.values())
    return claimable(load_kernel_paths(root), kernels.values(), recorded)


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
