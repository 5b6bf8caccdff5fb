"""Fetches the Definitions in flashinfer-bench's source distribution, a part of its dataset, for use without a clone.

python -m tools.compatibility.published [DIRECTORY]     # default: .flashinfer-bench

Only JSON files are kept, one per Definition. They are for the tests that run flashinfer-bench's evaluators; nothing of
them is committed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.shared.command import end_with
from tools.source_archives import LARGEST_FILE, file_hash

DISTRIBUTION, VERSION = "flashinfer-bench", "0.1.2"
SHA256 = "3056ba7a9da4ac3cf6727c50038b9c7422c75f0c38e14e1e9a9aaa59a775d238"
#: `digest` of the directory with its Definitions.
CONTENT = "cbec160375ffc39c02e57adced46eb172fc64eba35b30ee7befe185e7dd797a3"
DEFAULT = Path(".flashinfer-bench")
_MEMBER = re.compile(r"[\w.-]+/flashinfer_trace/definitions/\w+/(\w+\.json)")


class PublishedError(Exception):
    """The Definitions could not be fetched. The message says why."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "directory", nargs="?", type=Path, default=DEFAULT, help=f"a new directory (default: {DEFAULT})"
    )
    options = parser.parse_args(arguments)
    try:
        found = fetch(options.directory)
    except (PublishedError, OSError) as error:
        print(f"published: {error}", file=sys.stderr)
        return 1
    print(f"{options.directory}: {found} Definitions of {DISTRIBUTION} {VERSION}")
    return 0


def fetch(directory: Path, download: Callable[[Path], Path] | None = None, sha256: str = SHA256) -> int:
    """Writes the Definitions to a directory, unless it is there; returns how many it holds.

    Raises:
        PublishedError: the archive cannot be fetched, or is another one.
    """
    if directory.is_dir():
        return len(list(directory.glob("*.json")))
    with tempfile.TemporaryDirectory(dir=directory.absolute().parent, prefix=".partial-") as name:
        partial = Path(name)
        archive = (download or _download)(partial)
        if (found := file_hash(archive)) != sha256:
            raise PublishedError(f"{archive.name} has sha256 {found}, not {sha256}: the index serves another file")
        (partial / "definitions").mkdir()
        count = unpack(archive, partial / "definitions")
        os.replace(partial / "definitions", directory)
    return count


def unpack(archive: Path, directory: Path) -> int:
    """Writes the Definitions of a source distribution to a directory, whatever the paths in it say."""
    count = 0
    try:
        with tarfile.open(archive) as members:
            for member in members:
                match = _MEMBER.fullmatch(member.name)
                stream = members.extractfile(member) if match and member.isreg() else None
                if match is None or stream is None or member.size > LARGEST_FILE:
                    continue
                (directory / match[1]).write_bytes(stream.read())
                count += 1
    except (tarfile.TarError, EOFError) as error:
        raise PublishedError(f"{archive.name}: damaged ({error}); run again") from None
    if not count:
        raise PublishedError(f"{archive.name}: has no flashinfer_trace/definitions/*/*.json")
    return count


def digest(directory: Path) -> str:
    """The SHA-256 of the names and the content of all JSON files under a directory."""
    found = hashlib.sha256()
    for path in sorted(directory.rglob("*.json")):
        found.update(f"{path.name} {file_hash(path)}\n".encode())
    return found.hexdigest()


def identity(directory: Path) -> str:
    """The name of the dataset in a directory: the release, or the digest of another one."""
    found = digest(directory)
    return f"{DISTRIBUTION} {VERSION}" if found == CONTENT else f"files with the SHA-256 {found}"


def _download(directory: Path) -> Path:
    """Runs `pip download` for the source distribution; its version, which only git would tell, is given."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
    command += [f"--no-binary={DISTRIBUTION}", f"--dest={directory}", f"{DISTRIBUTION}=={VERSION}"]
    done = subprocess.run(command, env=os.environ | {"SETUPTOOLS_SCM_PRETEND_VERSION": VERSION})
    found = sorted(directory.glob("*.tar.gz"))
    if done.returncode or len(found) != 1:
        raise PublishedError(f"pip could not fetch the source of {DISTRIBUTION} {VERSION}")
    return found[0]


if __name__ == "__main__":
    end_with(main)
