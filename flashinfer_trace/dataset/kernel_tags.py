"""The tags of a Definition that name kernels. They follow from the table of kernels and the evidence."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.evidence import proofs
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.naming import Naming, family_name, load_naming, ordered
from flashinfer_trace.kernels import in_table
from flashinfer_trace.kernels.names import CALLED, KINDS, namespace_of


@dataclass(frozen=True)
class KernelTags:
    """The kernels of one Definition, by their paths in tags.

    Attributes:
        proven: they ran for it.
        named: the table has them for it, whether or not they ran.
        refused: the table has them for its family, but they do not compute it, alone or in a pipeline.
    """

    proven: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    @property
    def tags(self) -> frozenset[str]:
        """The tag of each kernel, in the namespace of its library if it ran, else `CALLED`."""
        return frozenset(f"{namespace_of(path) if path in self.proven else CALLED}:{path}" for path in self.named)

    def applied(self, tags: list[str], naming: Naming) -> list[str]:
        """Tags with exactly these kernels; unchanged, also in order, if they have them."""
        wanted = {tag for tag in tags if tag.partition(":")[0] not in KINDS} | self.tags
        return tags if set(tags) == wanted else ordered(wanted, naming)


def kernel_tags(root: Path, data: Mapping[str, Any]) -> KernelTags:
    """The tags that name kernels of a Definition, given its JSON, at a dataset root."""
    family = family_name(data, load_naming(root))
    try:
        definition = Definition.from_dict(dict(data))
    except InputError:  # validation says what is wrong
        return KernelTags()
    return kernel_tags_of(family or "", definition, {entry.kernel_label for entry in proofs(root, definition)})


def kernel_tags_of(family: str, definition: Definition, ran: Container[str]) -> KernelTags:
    """The tags that name kernels of a Definition, given the labels of the kernels whose evidence fits it."""
    proven, named, refused = set[str](), set[str](), set[str]()
    for label, kernel in in_table(family).items():
        if kernel.unsupported(definition) is not None:
            refused.update(kernel.tags)
            continue
        named.update(kernel.tags)
        if label in ran:
            proven.update(kernel.tags)
    return KernelTags(frozenset(proven), frozenset(named), frozenset(refused - named))
