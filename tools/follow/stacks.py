"""Stacks of releases: what stacks.toml says, and the Python sources of a stack's libraries."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.fetch_sources import LIBRARIES, PINS, Pin, fetch_pins, read_manifest, read_pins
from tools.kernel_paths.resolve import Roots
from tools.source_archives import DISTRIBUTIONS, FetchError

# tomllib is in the standard library since Python 3.11; tomli provides the same for 3.10.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Distributions whose sources are read, and whose versions the command line can choose.
READ = ("sglang", "sglang-kernel", "flashinfer-python", "sgl-deep-gemm", "sgl-flash-mla")


@dataclass(frozen=True)
class Stacks:
    """What stacks.toml says.

    Attributes:
        recorded, today: the releases of SGLang whose stacks the table of kernels names, and people run.
        stacks: release of SGLang -> distribution -> version.
    """

    recorded: str
    today: str
    stacks: Mapping[str, Mapping[str, str]]


def read_stacks(path: Path) -> Stacks:
    """Reads stacks.toml; raises FetchError, which names the file and the fix, if it is missing or malformed."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        stacks = {name: {key: str(value) for key, value in stack.items()} for name, stack in document["stacks"].items()}
        found = Stacks(document["recorded"], document["today"], stacks)
        for release in (found.recorded, found.today):
            if stacks[release]["sglang"] != release:
                raise FetchError(f"{path}: stacks.{release}.sglang must be {release}")
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror}; restore it from the repository") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{path}: not usable as stacks ({error!r}); restore it from the repository") from None
    return found


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
