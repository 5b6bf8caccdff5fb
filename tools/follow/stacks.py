"""The Python sources of the libraries of a stack of releases."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashinfer_trace.format.files import write_text
from tools.dry_run.install import PINNED, download
from tools.follow.resolve import Roots
from tools.source_archives import FetchError, unpack

#: Distributions whose sources are read, and whose versions the command line can choose -> the packages in their wheels,
#: the first of which each wheel has. A package of two wheels is that of the later distribution.
PACKAGES = {
    "sglang": ("sglang",),
    "sglang-kernel": ("sgl_kernel", "deep_gemm", "triton_kernels"),
    "flashinfer-python": ("flashinfer",),
    "sgl-deep-gemm": ("deep_gemm",),
    "sgl-flash-mla": ("flash_mla",),
}
READ = tuple(PACKAGES)
#: The sources are only read, so one fixed platform works on every machine and the result does not depend on it.
_WHEELS = (
    "--python-version=3.12",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)),
    "--platform=manylinux2014_x86_64",
)


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


def bring_stack(versions: Mapping[str, str], root: Path, fetch: bool = True) -> Stack:
    """The stack with these versions (distribution -> version), from what `root` has of it; the rest is fetched.

    Versions that are missing are those that the metadata of sglang pins. With `fetch` false, a library that is missing
    raises FetchError; InstallError is raised for what pip cannot fetch.
    """
    chosen = {name: versions[name] for name in READ if name in versions}
    if not {"sglang-kernel", "flashinfer-python"} <= set(chosen):
        metadata = (_library("sglang", chosen["sglang"], root, fetch, "METADATA") / "METADATA").read_text("utf-8")
        required = "\n".join(line for line in metadata.splitlines() if "extra ==" not in line)
        pins = {name.lower().replace("_", "-"): pin for name, pin in PINNED.findall(required)}
        chosen = {name: version for name, version in (pins | chosen).items() if name in READ}
        for name in {"sglang-kernel", "flashinfer-python"} - set(chosen):
            raise FetchError(f"sglang {chosen['sglang']} pins no version of {name}: choose one with --{name}")
    places: dict[str, Path] = {}
    owners: dict[str, str] = {}
    for name in READ:
        if name in chosen:
            directory = _library(name, chosen[name], root, fetch)
            for package in PACKAGES[name]:
                if (directory / package).is_dir():
                    owners[package], places[package] = name, directory
    return Stack({name: chosen[name] for name in READ if name in chosen}, owners, Roots(places))


def _library(distribution: str, version: str, root: Path, fetch: bool, needed: str = "") -> Path:
    """The directory that has a distribution's packages: complete or absent, made under another name, then renamed."""
    own = root / ".sources-stacks" / f"{distribution}-{version}"
    if (own / needed).exists():
        return own
    if not fetch:
        raise FetchError(f"{own}: no sources of {distribution} {version}; omit --offline to fetch them")
    own.parent.mkdir(exist_ok=True)
    print(f"follow: fetches {distribution} {version}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=f".partial-{own.name}-", dir=own.parent) as directory:
        wheel = download(f"{distribution}=={version}", Path(directory), *_WHEELS)
        partial = Path(directory, "sources")
        partial.mkdir()
        write_text(partial / "METADATA", unpack(wheel, PACKAGES[distribution], partial))
        shutil.rmtree(own, ignore_errors=True)
        partial.rename(own)
    return own
