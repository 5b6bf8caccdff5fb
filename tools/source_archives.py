"""Extracts Python files from a wheel into one directory, never outside it."""

from __future__ import annotations

import hashlib
import shutil
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

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


def unpack(wheel: Path, packages: Sequence[str], target: Path) -> str:
    """Writes the packages' .py files, and nothing else, to the directory `target`; returns the wheel's metadata.

    Raises FetchError for a broken wheel, a path that leads outside it, a link, or a wheel without the first package.
    """
    again = "run again to fetch it again"
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = PurePosixPath(member.filename)
                if path.suffix != ".py":
                    continue
                if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
                    raise FetchError(f"{wheel}: {member.filename!r} leads outside the wheel; {again}")
                if path.parts[0] not in packages:
                    continue
                if stat.S_ISLNK(member.external_attr >> 16):
                    raise FetchError(f"{wheel}: {member.filename!r} is a link; {again}")
                if member.file_size > LARGEST_FILE:
                    raise FetchError(f"{wheel}: {member.filename!r} claims {member.file_size} bytes; {again}")
                destination = target / path
                destination.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, destination.open("xb") as stream:
                    shutil.copyfileobj(source, stream, _BLOCK)
            metadata = [name for name in archive.namelist() if PurePosixPath(name).match("*.dist-info/METADATA")]
            text = archive.read(metadata[0]).decode("utf-8", errors="replace") if metadata else ""
    except FileExistsError as error:
        raise FetchError(f"{wheel}: contains {error.filename} twice; {again}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{wheel}: half-fetched or damaged ({error}); {again}") from None
    if not (target / packages[0]).is_dir():
        raise FetchError(f"{wheel}: has no {packages[0]}/*.py; its layout differs, so this release is not supported")
    return text
