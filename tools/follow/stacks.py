"""The Python sources of the libraries of a stack of releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.fetch_sources import LIBRARIES, PINS, Pin, fetch_pins, read_manifest, read_pins
from tools.follow.resolve import Roots
from tools.source_archives import DISTRIBUTIONS, FetchError

#: Distributions whose sources are read, and whose versions the command line can choose.
READ = ("sglang", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "sgl-flash-mla")


@dataclass(frozen=True)
class Stack:
    """The sources of one stack.

    Attributes:
        versions: distribution -> version, of those in `READ` that the stack has.
        owners: package -> the distribution that contains it.
        roots: the packages.
    """

    versions: Mapping[str, str]
    owners: Mapping[str, str]
    roots: Roots

    @property
    def packages(self) -> list[str]:
        """The names of the packages, sorted."""
        return sorted(self.owners)


def bring_stack(versions: Mapping[str, str], root: Path, console: Console | None = None, fetch: bool = True) -> Stack:
    """The stack with these versions (distribution -> version), from what `root` has of it; the rest is fetched.

    Versions that are missing are those that the metadata of sglang pins. With `fetch` false, a library that is missing
    raises FetchError, as what cannot be fetched does.
    """
    chosen = {name: versions[name] for name in READ if name in versions}
    if not {"sglang-kernel", "flashinfer-python"} <= set(chosen):
        entry, _ = _library("sglang", chosen["sglang"], root, console, fetch, requires=True)
        required = {name: version for name, version in entry["requires"].values() if name in READ}
        chosen = required | chosen
    owners: dict[str, str] = {}
    places: dict[str, Path] = {}
    for name in READ:
        if name in chosen:
            entry, directory = _library(name, chosen[name], root, console, fetch)
            for package in (LIBRARIES[DISTRIBUTIONS[name]], *entry.get("bundled", {})):
                owners[package] = name
                places[package] = directory
    return Stack({name: chosen[name] for name in READ if name in chosen}, owners, Roots(places))


def _library(
    distribution: str, version: str, root: Path, console: Console | None, fetch: bool, requires: bool = False
) -> tuple[dict[str, Any], Path]:
    """The manifest entry of a library, and the directory that has its packages."""
    library = DISTRIBUTIONS[distribution]
    own = root / ".sources-stacks" / f"{distribution}-{version}"
    for directory in (own, *sorted(root.glob(".sources*"))):
        entry = read_manifest(directory).get(library, {})
        known = (entry.get("distribution"), entry.get("version")) == (distribution, version)
        if known and (not requires or isinstance(entry.get("requires"), dict)):
            return entry, directory
    if not fetch:
        raise FetchError(f"{own}: no sources of {distribution} {version}; omit --offline to fetch them")
    own.parent.mkdir(exist_ok=True)
    _, releases = read_pins(PINS)
    hashed = {(pin.distribution, pin.version): pin for release in releases.values() for pin in release}
    pin = Pin(library, distribution, version)
    # Only without a hash does the manifest say what sglang requires.
    fetch_pins(own, [pin if requires else hashed.get((distribution, version), pin)], console, [library])
    return read_manifest(own)[library], own
