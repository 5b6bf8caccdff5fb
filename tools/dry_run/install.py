"""Installs a release of SGLang into a folder of its own: wheels without what they require, kernel libraries as sources.

A compiled library becomes the schemas of its operators, which stand in it as text; ``.schemas.json`` holds them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from flashinfer_trace.format import files
from tools.dry_run.release import FILES, Release, numbers, read

SCHEMAS = ".schemas.json"
#: An operator's schema as PyTorch writes it, in the bytes of a library.
_SCHEMA = re.compile(
    rb"[a-z_A-Z0-9:]{3,80}\((?:[ -~\n]){0,3000}?\) ?-> ?"
    rb"(?:\((?:[^()\x00]|\([^()\x00]*\)){0,200}\)|[A-Za-z?\[\]!() ,]{3,100})"
)
#: A pin of a wheel: a distribution, without its extras, and its version.
PINNED = re.compile(r"^Requires-Dist: ([A-Za-z0-9_.-]+)(?:\[[^]]*\])?==([^\s;,]+)", re.MULTILINE)
_BLOCK, _LONGEST = 1 << 24, 4000
#: Large files that only compilers read.
_UNUSED = (
    *("triton/backends/amd/lib", "triton/backends/nvidia/bin", "triton/backends/nvidia/lib"),
    *("flashinfer/data/cutlass", "flashinfer/data/cccl", "flashinfer/data/spdlog"),
)


class InstallError(RuntimeError):
    """A release cannot be installed. The message names what failed, and the fix."""


def install_release(version: str) -> tuple[Release, bool]:
    """Installs a release, or `newest`: that of the package index. Returns it, and whether it had to be installed.

    Raises:
        InstallError: pip could not fetch a package.
    """
    if not (FILES / f"{version}.json").exists():
        version = propose(None if version == "newest" else version)
    release = read(version)
    return release, install(release, release.site)


def install(release: Release, site: Path) -> bool:
    """Installs a release where it is not there yet; returns whether it had to.

    The folder is complete or absent: it is made next to its final place, then renamed.

    Raises:
        InstallError: pip could not fetch a package.
    """
    if (site / SCHEMAS).exists():
        return False
    site.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".partial-{site.name}-", dir=site.parent) as directory:
        partial = Path(directory, "site")
        wheels = [f"{name}=={version}" for name, version in release.distributions.items()]
        _pip(["install", "--no-compile", "--target", str(partial), *wheels])
        schemas = _from_libraries(partial)
        for name, version in release.sources_only.items():
            wheel = download(f"{name}=={version}", Path(directory))
            schemas |= _from_wheel(wheel, partial)
            wheel.unlink()
        for folder in _UNUSED:
            shutil.rmtree(partial / folder, ignore_errors=True)
        files.write_json(partial / SCHEMAS, schemas)
        shutil.rmtree(site, ignore_errors=True)
        partial.rename(site)
    return True


def propose(version: str | None) -> str:
    """Writes the data file of a release that has none: that of the closest release, with the versions that it pins.

    Args:
        version: of SGLang; None for the newest that the package index has.

    Returns:
        Its version.

    Raises:
        InstallError: pip could not fetch it.
    """
    with tempfile.TemporaryDirectory() as directory:
        wheel = download(f"sglang=={version}" if version else "sglang", Path(directory))
        found = wheel.name.split("-")[1]
        with zipfile.ZipFile(wheel) as archive:
            metadata = archive.read(f"sglang-{found}.dist-info/METADATA").decode()
    path = FILES / f"{found}.json"
    if not path.exists():
        nearest = min(FILES.glob("*.json"), key=lambda one: _distance(one.stem, found))
        content = json.loads(nearest.read_text(encoding="utf-8"))
        pins = {name.lower().replace("_", "-"): pin for name, pin in PINNED.findall(metadata)} | {"sglang": found}
        others = [json.loads(one.read_text(encoding="utf-8"))["distributions"] for one in FILES.glob("*.json")]
        wheels = {**content["distributions"], **{name: "" for one in others for name in one if name in pins}}
        content["distributions"] = {name: pins.get(name, pin) for name, pin in wheels.items()}
        content["sources_only"] = {name: pins[name] for name in ("sgl-kernel", "sglang-kernel") if name in pins}
        for required in ("tokenizers", "huggingface-hub"):
            content["distributions"][required] = _fitting("transformers", content["distributions"], required)
        files.write_text(path, json.dumps(content, indent=2) + "\n")
    return found


def _fitting(name: str, versions: Mapping[str, str], required: str) -> str:
    """The newest version of what a distribution requires, which refuses to be imported with another."""
    with tempfile.TemporaryDirectory() as directory:
        wheel = download(f"{name}=={versions[name]}", Path(directory))
        with zipfile.ZipFile(wheel) as archive:
            metadata = archive.read(f"{name}-{versions[name]}.dist-info/METADATA").decode()
        bounds = re.search(rf"^Requires-Dist: ({required}[^;\n]*)", metadata, re.MULTILINE)
        wheel.unlink()
        return download(bounds[1].strip() if bounds else required, Path(directory)).name.split("-")[1]


def _distance(one: str, other: str) -> tuple[int, ...]:
    """How far apart two versions are: by each of their numbers, beginning with the first."""
    return tuple(abs(a - b) for a, b in zip(numbers(one), numbers(other), strict=False))


def schemas(site: Path) -> dict[str, list[str]]:
    """Library of an installed release -> the schemas that stand in it."""
    found: dict[str, list[str]] = json.loads((site / SCHEMAS).read_text(encoding="utf-8"))
    return found


def _pip(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise InstallError(f"pip {arguments[0]} failed: {' '.join(last)}; check the connection and the package index")


def download(requirement: str, folder: Path, *options: str) -> Path:
    """The wheel of a requirement, fetched into `folder`, which has no other. Raises InstallError."""
    _pip(["download", "--dest", str(folder), *options, requirement])
    return next(folder.glob("*.whl"))


def _from_libraries(site: Path) -> dict[str, list[str]]:
    """The schemas of the compiled libraries of the kernel packages that are installed whole."""
    found = {}
    for path in sorted(site.glob("*/*.so")):
        with path.open("rb") as file:
            texts = _texts(iter(lambda: file.read(_BLOCK), b""))
        if texts:
            found[path.relative_to(site).as_posix()] = texts
    return found


def _from_wheel(wheel: Path, site: Path) -> dict[str, list[str]]:
    """Unpacks the Python files and metadata of a wheel, and returns the schemas of its libraries."""
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", "/METADATA")):
                archive.extract(name, site)
            elif name.endswith(".so") and "/" in name and not name.startswith("lib/"):
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).touch()  # packages look whether it is there before they load it
                with archive.open(name) as file:
                    texts = _texts(iter(lambda: file.read(_BLOCK), b""))
                if texts:
                    found[name] = texts
    return found


def _texts(blocks: Iterator[bytes]) -> list[str]:
    """The schemas in the bytes of a library; neighboring blocks overlap by the longest schema."""
    found: dict[str, None] = {}
    tail = b""
    for block in blocks:
        data = tail + block
        if b") -> " in data or b")->" in data:
            for match in _SCHEMA.finditer(data):
                found[re.sub(r"\s+", " ", match.group().decode(errors="replace")).strip()] = None
        tail = data[-_LONGEST:]
    return list(found)
