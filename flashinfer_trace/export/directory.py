"""A directory that is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ExportError", "new_directory"]


class ExportError(ValueError):
    """An export that cannot be written. The message names the place and the fix."""


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A temporary directory beside `out`, which becomes `out` at the end, or is removed after an error.

    Raises:
        ExportError: `out` is a file, a directory with something in it or the current one, or cannot be made.
    """
    try:
        if out.resolve() == Path.cwd():
            raise ExportError(f"{out} is the current directory; name a new one")
        taken = out.is_symlink() or (out.exists() and not out.is_dir())
        if taken or (out.is_dir() and any(out.iterdir())):
            what = "is not a directory" if taken else "is not empty"
            raise ExportError(f"{out} {what}; name a new directory, or remove it first")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
    except OSError as error:
        raise ExportError(f"{out}: cannot be written ({error.strerror}); name another directory") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        os.replace(temporary, out)  # over an empty directory, but not over one that was filled in the meantime
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise ExportError(f"{out}: cannot be written ({error.strerror}); nothing was exported") from error
        raise


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
