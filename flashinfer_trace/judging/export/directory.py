"""A directory that is written whole or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


class ExportError(ValueError):
    """An export that cannot be written. The message names the place and the fix."""


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A temporary directory next to `out`. It becomes `out` at the end, or is removed after an error.

    Parents of `out` that were made for it are removed as well. SIGTERM and SIGHUP also count as errors.

    Raises:
        ExportError: `out` is a file, a directory with something in it or the current one, or cannot be made.
        SystemExit: SIGTERM or SIGHUP came.
    """
    try:
        if out.resolve() == Path.cwd():
            raise ExportError(f"{out} is the current directory; name a new one")
        taken = out.is_symlink() or (out.exists() and not out.is_dir())
        if taken or (out.is_dir() and any(out.iterdir())):
            what = "is not a directory" if taken else "is not empty"
            raise ExportError(f"{out} {what}; name a new directory, or remove it first")
        with _ended_by_signals(), _parents(out):
            temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
            try:
                yield temporary
                temporary.chmod(0o777 & ~_umask())
                os.replace(temporary, out)  # over an empty directory, but not over one that was filled in the meantime
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        why = f"cannot be written ({error.strerror}), and nothing was exported"
        raise ExportError(f"{out}: {why}; name another directory") from error


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Makes the parents of `out`; after an error, removes those that it made, unless there is something in them."""
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, unless somebody handles or ignores them; only the first one does."""

    def end(number: int, frame: FrameType | None) -> None:
        for one in replaced:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()  # where Python handles signals
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if here and hasattr(signal, name)]
    replaced = [one for one in numbers if signal.getsignal(one) is signal.SIG_DFL]
    try:
        for one in replaced:
            signal.signal(one, end)
        yield
    finally:
        for one in replaced:
            signal.signal(one, signal.SIG_DFL)


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
