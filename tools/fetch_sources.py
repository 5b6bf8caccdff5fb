"""Fetches the pinned sources of sglang, sgl-kernel and FlashInfer for the tools that read them.

- `python -m tools.fetch_sources`: the default release of tools/sources.toml, to .sources/
- `python -m tools.fetch_sources --release 0.5.15`: another release, with the kernel libraries it requires
- `python -m tools.fetch_sources --release 0.5.15 --only flashinfer-python --dest .sources-flashinfer`: one library
- `python -m tools.fetch_sources --install --release 0.5.23`: SGLang, to run, in its own folder (for tools.dry_run)
- `python -m tools.fetch_sources --from ~/checkouts`: copies git checkouts or unpacked wheels instead

Without --install, only .py files are kept (.sources/sglang, .sources/sgl_kernel, .sources/flashinfer, and what
sgl-kernel's wheel contains besides: .sources/deep_gemm, .sources/triton_kernels); nothing is installed or imported.
.sources/manifest.json lists the libraries that are present; they are not fetched again. After an interruption, run the
same command again: finished libraries are kept; a half-fetched wheel is recognized by its hash and fetched again.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from flashinfer_trace.format.files import write_json
from tools.dry_run.install import InstallError, propose
from tools.dry_run.install import install as install_release
from tools.dry_run.release import DEFAULT, FILES, ReleaseError
from tools.dry_run.release import read as read_release
from tools.shared.command import end_with
from tools.shared.source_packages import package_hash, package_version
from tools.source_archives import (
    BUNDLED,
    FURTHER,
    PACKAGES,
    FetchError,
    copy_checkout,
    file_hash,
    required_versions,
    unpack_package,
    unpack_wheel,
)

# tomllib is in the standard library since Python 3.11; tomli provides the same for 3.10.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIBRARIES = PACKAGES | FURTHER
PINS = Path(__file__).with_name("sources.toml")
# The sources are only read, so one fixed platform works on every machine and the result does not depend on it.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
PYTHON = "3.12"
NO_NETWORK = ("ConnectionError", "NameResolution", "Timeout", "ProxyError", "SSLError", "Max retries", "IncompleteRead")


@dataclass(frozen=True)
class Pin:
    """One library to fetch.

    Attributes:
        name: its name in traces: sglang, sgl-kernel or flashinfer-python.
        distribution: its name on PyPI.
        version: the exact version.
        sha256, size: hash and size in bytes of the wheel; None if tools/sources.toml does not give them.
    """

    name: str
    distribution: str
    version: str
    sha256: str | None = None
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all sources are present, 1 they could not be fetched, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dest", type=Path, default=Path(".sources"), metavar="DIR", help="where to put them (default: .sources)"
    )
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument("--release", "--sglang", metavar="VERSION", help="a release of sglang other than the default")
    origin.add_argument("--from", dest="checkouts", type=Path, metavar="DIR", help="copy from here instead of fetching")
    parser.add_argument(
        "--only", action="append", choices=PACKAGES, help="fetch this library, and leave out the others"
    )
    parser.add_argument("--install", action="store_true", help="install the release (or `newest`) for tools.dry_run")
    options = parser.parse_args(arguments)
    if options.install:
        return _install(options.release)
    if options.only and options.checkouts is not None:
        parser.error("--only chooses what is fetched; it cannot be combined with --from")
    console = Console(stderr=True)
    try:
        if options.checkouts is None:
            changed = fetch(options.dest, options.release, console=console, only=options.only or PACKAGES)
        else:
            changed = take(options.dest, options.checkouts)
    except FetchError as error:
        print(f"fetch_sources: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "fetch_sources: interrupted; finished libraries are kept, run the same command to continue", file=sys.stderr
        )
        return 130
    for name, entry in read_manifest(options.dest).items():
        state = "fetched" if name in changed else "already present"
        print(f"{options.dest / LIBRARIES[name]}: {entry['distribution']} {entry['version']}, {state}")
    return 0


def _install(version: str | None) -> int:
    try:
        if version is not None and not (FILES / f"{version}.json").exists():
            version = propose(None if version == "newest" else version)
        release = read_release(version or DEFAULT)
        changed = install_release(release, release.site)
    except (InstallError, ReleaseError) as error:
        print(f"fetch_sources: {error}", file=sys.stderr)
        return 1
    print(f"{release.site}: sglang {release.version}, {'installed' if changed else 'already present'}")
    return 0


def fetch(
    dest: Path,
    sglang: str | None = None,
    pins: Path = PINS,
    console: Console | None = None,
    only: Collection[str] = tuple(PACKAGES),
) -> list[str]:
    """Fetches one release into `dest` and returns the names of the libraries that had to be fetched.

    `only` names the libraries to fetch. Raises FetchError, whose message names the file and the fix.
    """
    default, releases = read_pins(pins)
    version = sglang or default
    known = releases.get(version)
    if known is None and "sglang" not in only:
        raise FetchError(
            f"{pins}: release {version} is not listed, so sglang itself must say what it requires: omit --only"
        )
    return fetch_pins(dest, known or [Pin("sglang", "sglang", version)], console, only)


def fetch_pins(
    dest: Path, pins: Sequence[Pin], console: Console | None = None, only: Collection[str] = ()
) -> list[str]:
    """Fetches these libraries into `dest`, and returns the names of those that had to be fetched.

    If sglang is there without a hash, the libraries in `only` that its metadata requires follow. A library that is in
    `only` and not wanted any more leaves the manifest. Raises FetchError.
    """
    with writing(dest):
        dest.mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(dest)
        changed: list[str] = []
        wanted = [pin for pin in pins if pin.name in only or not only]
        for pin in wanted:
            entry = manifest.get(pin.name)
            if entry is None or not is_current(dest, pin, entry):
                entry = bring(dest, pin, console)
                changed.append(pin.name)
            if pin.name == "sglang" and pin.sha256 is None:
                # The metadata of an unknown release says which kernel libraries belong to it.
                wanted += [Pin(name, *needs) for name, needs in sorted(entry["requires"].items()) if name in only]
        for name in (set(manifest) & set(only)) - {pin.name for pin in wanted}:
            write_manifest(dest, name, None)
        remove(dest / ".wheels")
    return changed


def take(dest: Path, checkouts: Path) -> list[str]:
    """Copies the .py files of git checkouts or unpacked wheels below `checkouts` to `dest`; returns the names."""
    if not checkouts.is_dir():
        raise FetchError(f"{checkouts}: no such directory; --from takes the directory that contains the checkouts")
    if dest.resolve() == checkouts.resolve():
        raise FetchError(f"{dest}: --dest and --from are the same directory; choose another --dest")
    with writing(dest):
        dest.mkdir(parents=True, exist_ok=True)
        for name, package in PACKAGES.items():
            staging = dest / f".partial-{package}"
            remove(staging)
            origin = copy_checkout(checkouts, package, staging)
            entry = {"distribution": name, "version": package_version(origin, name), "wheel_sha256": None}
            install(dest, name, staging, entry)
    return list(PACKAGES)


def bring(dest: Path, pin: Pin, console: Console | None) -> dict[str, Any]:
    """Fetches one wheel, checks it, unpacks its .py files, deletes it, and returns its manifest entry."""
    wheels = dest / ".wheels"
    wheels.mkdir(exist_ok=True)
    wheel = wheels / f"{pin.distribution}-{pin.version}.whl"
    if wheel.exists() and (pin.sha256 is None or file_hash(wheel) != pin.sha256):
        # Left by an interruption: only a matching hash proves that it is complete.
        wheel.unlink()
    if not wheel.exists():
        room = shutil.disk_usage(dest).free
        if pin.size is not None and room < pin.size * 1.1:
            raise FetchError(
                f"{wheel}: no space for {pin}: {pin.size / 1e6:.0f} MB are needed (only until it is unpacked), "
                f"{room / 1e6:.0f} MB are free; free some space or choose another --dest"
            )
        download(pin, wheel, console)
    found = file_hash(wheel)
    if pin.sha256 is not None and found != pin.sha256:
        wheel.unlink()
        raise FetchError(
            f"{wheel}: the wheel of {pin} has sha256 {found}, tools/sources.toml says {pin.sha256}; it was deleted. "
            f"Run again; if this persists, the package index (mirror, proxy) serves another file or the pin is wrong"
        )
    package = LIBRARIES[pin.name]
    staging = dest / f".partial-{package}"
    remove(staging)
    try:
        unpack_wheel(wheel, package, staging)
        bundled = {name: dest / f".partial-{name}" for name in BUNDLED.get(pin.name, ())}
        for name, target in bundled.items():
            remove(target)
            unpack_package(wheel, name, target)
        entry: dict[str, Any] = {"distribution": pin.distribution, "version": pin.version, "wheel_sha256": found}
        if pin.name == "sglang" and pin.sha256 is None:
            requires = required_versions(wheel)
            entry["requires"] = {name: list(needs) for name, needs in requires.items()}
        if bundled:
            present = {name: target for name, target in bundled.items() if target.is_dir()}
            entry["bundled"] = {name: place(dest, name, target) for name, target in present.items()}
        install(dest, pin.name, staging, entry)
    except FetchError:
        wheel.unlink()  # otherwise the next run would find the same broken wheel
        raise
    finally:
        remove(staging)
    wheel.unlink()
    return entry


def download(pin: Pin, target: Path, console: Console | None = None) -> None:
    """Runs `pip download` for exactly one wheel, shows the progress, and renames the wheel to `target`."""
    staging = target.with_name(f".partial-{pin.name}")
    remove(staging)
    staging.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--python-version={PYTHON}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += ["--dest", str(staging / "done"), f"{pin.distribution}=={pin.version}"]
    # pip downloads to TMPDIR. Below the destination, its growth can be watched and it uses the requested disk.
    environment = os.environ | {"TMPDIR": str(staging)}
    log = staging / "pip.log"
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console
    )
    try:
        with log.open("wb") as output, progress:
            task = progress.add_task(str(pin), total=pin.size)
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            try:
                while True:
                    try:
                        process.wait(0.2)
                        break
                    except subprocess.TimeoutExpired:
                        progress.update(task, completed=_size(staging))
            finally:
                process.kill()
                process.wait()
            progress.update(task, completed=_size(staging / "done"))
        found = sorted((staging / "done").glob("*.whl"))
        if process.returncode or len(found) != 1:
            raise FetchError(explain(pin, target, log.read_text(encoding="utf-8", errors="replace")))
        os.replace(found[0], target)
    finally:
        remove(staging)


def explain(pin: Pin, target: Path, output: str) -> str:
    """Explains why `pip download` failed, and the fix."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    offered = next((line for line in lines if "(from versions:" in line), "").partition("(from versions:")[2]
    versions = [word.strip() for word in offered.rstrip(") ").split(",") if word.strip() not in ("", "none")]
    if "No space left" in output or "Errno 28" in output:
        return f"{target}: no space left while fetching {pin}; free some space or choose another --dest"
    if versions:
        return (
            f"{target}: the package index has no wheel of {pin} for {PLATFORMS[-1]} and Python {PYTHON}; "
            f"the newest versions that it offers: {', '.join(versions[-5:])}"
        )
    # Without retries, pip does not report the reason; it only says that it found no version at all.
    if offered or any(sign in output for sign in NO_NETWORK):
        return (
            f"{target}: no network: pip could not reach the package index for {pin}, or it has no such project. "
            f"Check the connection, PIP_INDEX_URL and the proxy, then run again; or copy the sources with --from DIR"
        )
    if "No module named pip" in output:
        return f"{sys.executable}: has no pip; run `{sys.executable} -m ensurepip`, or copy the sources with --from DIR"
    return f"{target}: pip could not fetch {pin}: {' / '.join(lines[-3:]) or 'pip printed nothing'}"


def install(dest: Path, name: str, staging: Path, entry: dict[str, Any]) -> None:
    """Replaces the old package with the unpacked one; the manifest lists it only when it is complete."""
    package = LIBRARIES[name]
    write_manifest(dest, name, None)
    remove(dest / package)
    os.replace(staging, dest / package)
    entry["sha256"] = package_hash(dest / package)
    write_manifest(dest, name, entry)


def place(dest: Path, package: str, staging: Path) -> str:
    """Replaces an old package that a wheel contains besides its own; returns the hash of the new one."""
    remove(dest / package)
    os.replace(staging, dest / package)
    return package_hash(dest / package)


def is_current(dest: Path, pin: Pin, entry: dict[str, Any]) -> bool:
    """Whether the library matches the manifest, and the manifest matches the pin."""
    if (entry.get("distribution"), entry.get("version")) != (pin.distribution, pin.version):
        return False
    if entry.get("wheel_sha256") is None or (pin.sha256 is not None and entry["wheel_sha256"] != pin.sha256):
        return False
    if pin.name == "sglang" and pin.sha256 is None and not isinstance(entry.get("requires"), dict):
        return False
    bundled = entry.get("bundled", None if pin.name in BUNDLED else {})
    if not isinstance(bundled, dict) or any(package_hash(dest / name) != known for name, known in bundled.items()):
        return False
    package = dest / LIBRARIES[pin.name]
    return package.is_dir() and package_hash(package) == entry.get("sha256")


def read_manifest(dest: Path) -> dict[str, dict[str, Any]]:
    """Library -> its manifest entry; empty without a readable manifest (then everything is fetched again)."""
    try:
        sources = json.loads((dest / "manifest.json").read_text(encoding="utf-8"))["sources"]
        return {name: sources[name] for name in LIBRARIES if isinstance(sources.get(name), dict)}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_manifest(dest: Path, name: str, entry: dict[str, Any] | None) -> None:
    """Sets or removes the entry of one library."""
    entries = read_manifest(dest) | ({} if entry is None else {name: entry})
    if entry is None:
        entries.pop(name, None)
    write_json(dest / "manifest.json", {"sources": {name: entries[name] for name in LIBRARIES if name in entries}})


def read_pins(path: Path) -> tuple[str, dict[str, list[Pin]]]:
    """The default release, and the libraries of every release in tools/sources.toml."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        releases = {}
        for version, libraries in document["releases"].items():
            releases[version] = [
                Pin(name, pin["distribution"], pin["version"], pin["sha256"], pin.get("size"))
                for name, pin in ((name, libraries[name]) for name in PACKAGES)
            ]
        if document["default"] not in releases:
            raise FetchError(f"{path}: the default release {document['default']} is not listed")
        return document["default"], releases
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror}; restore it from the repository") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FetchError(f"{path}: not usable as pins ({error!r}); restore it from the repository") from None


@contextmanager
def writing(dest: Path) -> Iterator[None]:
    """Turns an OSError raised while writing to `dest` into a FetchError."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or dest
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(f"{place}: no space left; free some space or choose another --dest") from None
        reason = error.strerror or error
        raise FetchError(f"{place}: {reason}; {dest} must be a writable directory, choose another --dest") from None


def remove(path: Path) -> None:
    """Removes a file or a directory if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size(directory: Path) -> int:
    """The size in bytes of a directory to which another process is writing."""
    total = 0
    for parent, _, files in os.walk(directory):  # passes over a directory that is gone when its turn comes
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
                total += Path(parent, name).stat().st_size
    return total


if __name__ == "__main__":
    end_with(main)
