"""Overlays: roots of Definitions that other programs wrote. Importing this imports no torch.

An overlay is a folder of FlashInfer's dumps, or a TraceSet of flashinfer-bench. Many of its Definitions have the name
of one here, so each is named by its file. Their claims about themselves, such as ``status:verified``, do not count.
Each is listed with the Definition here that it resembles in names, sizes and contract; the evidence of that one speaks
for it only if the oracle agrees (`judging.dumped`).
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashinfer_trace.dataset.dumps import (
    Dump,
    DumpError,
    Match,
    differences,
    dump_files,
    is_dump,
    matches,
    read_dump,
    versions,
)
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.roots import find_overlays


@dataclass(frozen=True)
class Overlaid:
    """One Definition of an overlay.

    Attributes:
        file: it, relative to the current directory if that is around it.
        definition: without the tags that claim evidence.
        match: the Definition here that it resembles most; None if nothing here is like it.
        differs: in what its contract differs from that one.
    """

    file: str
    definition: Definition
    match: Match | None
    differs: tuple[str, ...]

    @property
    def told(self) -> str:
        """The result of comparing names, sizes and contract, without running it."""
        if self.match is None:
            return "unknown here"
        name = self.match.definition.name if self.match.exists else f"the family {self.match.family}"
        if self.differs:
            return f"differs from {name}"
        return f"resembles {name}" if self.match.exists else f"new size of {self.match.family}"


def overlays() -> list[list[Overlaid]]:
    """The Definitions of each overlay, by name.

    Raises:
        DumpError: a file is not a Definition, or two of one overlay have one name.
        DatasetError: see `find_overlays`.
    """
    return [list(map(overlaid, _read(dump_files(root)))) for root in find_overlays()]


def _read(files: Sequence[Path]) -> Iterator[Dump]:
    first: dict[str, Path] = {}
    for path in files:
        dump = read_dump(path)
        if (other := first.setdefault(dump.name, path)) != path:
            raise DumpError(f"{path}: {other} has the name {dump.name} too; remove one of them from this root")
        yield dump


def overlaid(dump: Dump) -> Overlaid:
    """A dump, and what it resembles here: the first candidate with its contract, or else the first one."""
    found = [(match, tuple(differences(dump, match))) for match in matches(dump, versions()[-1])]
    match, differs = next((one for one in found if not one[1]), found[0] if found else (None, ()))
    tags = tuple(tag for tag in dump.definition.tags if not tag.startswith("status:"))
    assert dump.definition.path is not None
    return Overlaid(shown(dump.definition.path), replace(dump.definition, tags=tags), match, differs)


def is_of_others(path: Path) -> bool:
    """Whether a file is in an overlay, or has what dumps have and Definitions of this dataset have not.

    Raises:
        DumpError: it cannot be read.
    """
    return is_overlaid(path) or is_dump(path)


def is_overlaid(path: Path) -> bool:
    """Whether a file or directory is in an overlay."""
    resolved = Path(os.path.realpath(path))
    return any(resolved.is_relative_to(root) for root in find_overlays())


def overlay_files(name: str) -> list[str]:
    """The files of overlays that a name or glob means."""
    files = [path for root in find_overlays() for path in dump_files(root)]
    return [shown(path) for path in files if fnmatch.fnmatchcase(path.stem, name)]


def shown(path: Path) -> str:
    """A path as people give it: relative to the current directory if that is around it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
