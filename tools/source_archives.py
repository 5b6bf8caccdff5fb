"""Extracts the .py files of a Python package from a wheel or a git checkout into one directory, never outside it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import zipfile
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

# Library name in traces -> name of the package to import.
PACKAGES = {"sglang": "sglang", "sgl-kernel": "sgl_kernel", "flashinfer-python": "flashinfer"}
# Further libraries that a release may require: only `python -m tools.follow` reads them.
FURTHER = {"sgl-deep-gemm": "deep_gemm", "sgl-flash-mla": "flash_mla"}
# Packages that the wheel of a library contains besides its own; older wheels and checkouts lack some of them.
BUNDLED = {"sgl-kernel": ("deep_gemm", "triton_kernels")}
# Where a package may be below the given directory, and what it must contain: checkouts first, then unpacked wheels.
PLACES = {
    "sglang": (("sglang/python/sglang", "python/sglang", "sglang"), "srt"),
    "sgl_kernel": (
        ("sglang/sgl-kernel/python/sgl_kernel", "sgl-kernel/python/sgl_kernel", "sgl_kernel"),
        "__init__.py",
    ),
    "flashinfer": (("flashinfer/flashinfer", "flashinfer"), "__init__.py"),
}
DISTRIBUTIONS = {
    "sglang": "sglang",
    "sgl-kernel": "sgl-kernel",
    "sglang-kernel": "sgl-kernel",  # its name on PyPI since 0.4.0
    "flashinfer-python": "flashinfer-python",
    **{name: name for name in FURTHER},
}
# No source file comes close to this size; a larger one indicates a damaged or hostile archive.
LARGEST_FILE = 32 << 20
_BLOCK = 1 << 20


class FetchError(Exception):
    """The sources could not be fetched; the message names the file and says what to do."""


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def unpack_wheel(wheel: Path, package: str, target: Path) -> None:
    """Writes the package's .py files, and nothing else, to the new directory `target`.

    Raises FetchError for a broken wheel, a path that leads outside it, a link, or a wheel without the package.
    """
    if not unpack_package(wheel, package, target):
        raise FetchError(f"{wheel}: has no {package}/*.py; its layout differs, so this release is not supported")


def unpack_package(wheel: Path, package: str, target: Path) -> bool:
    """Like `unpack_wheel`; returns whether the wheel has the package at all."""
    again = "run again to fetch it again"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".py")]
            wanted = 0
            for member in members:
                path = PurePosixPath(member.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
                    raise FetchError(f"{wheel}: {member.filename!r} leads outside the wheel; nothing was kept; {again}")
                if path.parts[0] != package:
                    continue
                if stat.S_ISLNK(member.external_attr >> 16):
                    raise FetchError(f"{wheel}: {member.filename!r} is a link; nothing was kept; {again}")
                if member.file_size > LARGEST_FILE:
                    raise FetchError(f"{wheel}: {member.filename!r} claims {member.file_size} bytes; {again}")
                destination = target.joinpath(*path.parts[1:])
                destination.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, destination.open("xb") as stream:
                    shutil.copyfileobj(source, stream, _BLOCK)
                wanted += 1
    except FileExistsError as error:
        raise FetchError(f"{wheel}: contains {error.filename} twice; {again}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{wheel}: half-fetched or damaged ({error}); {again}") from None
    return bool(wanted)


def required_versions(wheel: Path) -> dict[str, tuple[str, str]]:
    """The kernel libraries that sglang's wheel pins to one version: library -> (name on PyPI, version)."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        text = archive.read(names[0]).decode("utf-8", errors="replace") if names else ""
    required: dict[str, tuple[str, str]] = {}
    for line in HeaderParser().parsestr(text).get_all("Requires-Dist") or []:
        match = re.match(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?\s*==\s*([\w.!+]+)\s*\)?\s*(?:;|$)", line)
        if match and "extra" not in line.partition(";")[2]:
            distribution = re.sub(r"[-_.]+", "-", match[1]).lower()
            if distribution in DISTRIBUTIONS:
                required[DISTRIBUTIONS[distribution]] = (distribution, match[2])
    missing = [name for name in PACKAGES if name != "sglang" and name not in required]
    if missing:
        raise FetchError(
            f"{wheel}: the metadata pins no version of {' and '.join(missing)}; add this release to tools/sources.toml"
        )
    return required


def copy_checkout(checkouts: Path, package: str, target: Path) -> Path:
    """Copies the package's .py files from a checkout or an unpacked wheel to the new directory `target`.

    Links are not followed. Returns where the package was found; raises FetchError if it was not found.
    """
    places, mark = PLACES[package]
    origin = next((checkouts / place for place in places if (checkouts / place / mark).exists()), None)
    if origin is None:
        tried = ", ".join(str(checkouts / place / mark) for place in places)
        raise FetchError(f"{checkouts}: no {package} here (tried {tried}); put it there, or omit --from")
    target.mkdir()
    for directory, folders, files in os.walk(origin):
        folders.sort()
        for name in sorted(files):
            source = Path(directory, name)
            if name.endswith(".py") and source.is_file() and not source.is_symlink():
                destination = target / source.relative_to(origin)
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, destination)
    return origin
