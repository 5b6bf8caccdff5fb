"""Specialties of a release of SGLang: ``releases/<version>.json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.format import json_source

#: The files, and where releases are installed.
FILES = Path(__file__).with_name("releases")
SITES = Path(__file__).resolve().parents[2] / ".sources-installed"
#: The release that is run if none is named.
DEFAULT = "0.5.23"


class ReleaseError(ValueError):
    """A release is not known. The message names those that are."""


@dataclass(frozen=True)
class Release:
    """One release.

    Attributes:
        version: of SGLang.
        distributions: name -> version of the wheels that are installed, without what they require.
        sources_only: those of which Python files and schemas are taken, because their libraries need a GPU.
        namespaces: start of a compiled library's path -> the namespace of its operators.
        schemas: namespace -> operators whose schema the library holds in no text, because it is derived from C++.
        required: name -> version of distributions that SGLang asks for and that its PyTorch for CUDA brings.
        environment: variables that are set before SGLang is imported.
    """

    version: str
    distributions: Mapping[str, str]
    sources_only: Mapping[str, str]
    namespaces: Mapping[str, str]
    schemas: Mapping[str, list[str]]
    required: Mapping[str, str]
    environment: Mapping[str, str]

    @property
    def site(self) -> Path:
        """The folder into which it is installed."""
        return SITES / f"sglang-{self.version}"


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, which order versions."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def read(version: str = DEFAULT) -> Release:
    """A release of this checkout; `newest` is the newest that has a file.

    Raises:
        ReleaseError: the version does not have a file.
    """
    if version == "newest":
        version = max((one.stem for one in FILES.glob("*.json")), key=numbers)
    path = FILES / f"{version}.json"
    if not path.exists():
        known = ", ".join(sorted(one.stem for one in FILES.glob("*.json")))
        raise ReleaseError(f"SGLang {version}: no {path.name} in tools/dry_run/releases; there are {known}")
    content: dict[str, Any] = json_source.load_object(path)
    return Release(version=version, **content)
