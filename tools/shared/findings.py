"""Defects of real kernels, as findings/kernels.json describes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import load_object


@dataclass(frozen=True)
class Defect:
    """One input and what the kernel does with it; the fields are those of schema/findings.schema.json."""

    input: str
    result: str
    right: str
    state: str
    probes: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Finding:
    """The defects of one kernel, or of several that share the code."""

    id: str
    title: str
    kernels: tuple[str, ...]
    library: str
    version: str
    upstream: dict[str, str]
    defects: tuple[Defect, ...]


def read_findings(root: Path) -> Iterator[Finding]:
    """Each finding, in order; none for a root without the file.

    Raises:
        JsonSourceError: the file is not JSON.
    """
    path = root / "findings" / "kernels.json"
    for one in load_object(path)["findings"] if path.exists() else []:
        yield Finding(**{**one, "kernels": tuple(one["kernels"]), "defects": tuple(map(_defect, one["defects"]))})


def _defect(fields: dict[str, Any]) -> Defect:
    return Defect(**{**fields, "probes": tuple(fields["probes"])})
