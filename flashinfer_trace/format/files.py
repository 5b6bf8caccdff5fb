"""Files: read within limits, written whole or not at all, and the one place that lays out JSON.

Whatever a command reads may come from anybody: a link to a device, a FIFO without a writer, gigabytes. `read_bytes` is
the only way in; `json_source` stands on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Largest file, in bytes, where no caller knows better. The largest Definition has about 20 KiB.
MAX_BYTES = 4 * 1024 * 1024
#: Seconds within which a write has locked the temporary file that it made.
LOCKED_WITHIN = 5.0
_TEMPORARY = ".part"
_LEFTOVER = re.compile(r"\..+\.[a-z0-9_]{8}" + re.escape(_TEMPORARY))

#: Separators of members and of keys on one line.
COMPACT, SPACED = (",", ":"), (", ", ": ")


class UnreadableFile(ValueError):
    """A file that cannot be read, or that no command should read. The message names the file and the fix.

    Attributes:
        rule: file-unreadable, file-kind, file-size or json-encoding (see `validation.problems.RULES`).
        reason, hint: what is wrong, and the fix.
        line: where, counted from 1.
    """

    def __init__(self, path: Path, rule: str, reason: str, hint: str, line: int = 1) -> None:
        super().__init__(f"{path}: {reason} ({hint})")
        self.rule, self.reason, self.hint, self.line = rule, reason, hint, line


def read_bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Never blocks on a FIFO and never reads more than the limit.

    Args:
        path: where it lies; a link is followed, but only to a regular file.
        limit: most bytes.

    Raises:
        UnreadableFile: it cannot be read, is not a regular file, or is larger.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer forever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise UnreadableFile(path, "file-kind", "is a directory, not a file", "remove it or rename it")
        descriptor = os.open(path, flags)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UnreadableFile(path, "file-kind", "is not a regular file", "replace it by a plain file")
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, UnreadableFile):
            raise
        told = getattr(error, "strerror", None) or str(error)
        reason = "symbolic links in a loop" if getattr(error, "errno", 0) == errno.ELOOP else told
        hint = "check the path and its permissions"
        raise UnreadableFile(path, "file-unreadable", f"cannot be read: {reason}", hint) from None
    if len(content) > limit:
        size = f"{limit // 1024**2} MiB" if limit >= 1024**2 else f"{limit} bytes"
        raise UnreadableFile(path, "file-size", f"is larger than {size}", "such a file has a few KiB")
    return content


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """`read_bytes` as UTF-8 text, with line breaks as in Python (``\\n``).

    Raises:
        UnreadableFile: it cannot be read, is larger than the limit, or is not UTF-8.
    """
    content = read_bytes(path, limit)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{content[error.start]:02x} at offset {error.start} is not UTF-8"
        raise UnreadableFile(path, "json-encoding", reason, "save the file as UTF-8", line) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 text to a temporary file next to `path`, then renames it over `path`.

    Leftovers of a killed write in that directory are removed (see `sweep`).
    """
    sweep(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            fcntl.flock(handle, fcntl.LOCK_EX)
            stream.write(text)
            stream.flush()
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sweep(directory: Path) -> list[Path]:
    """Removes the temporary files that killed writes left in a directory, and returns them.

    A write that is under way holds a lock on its file, which is released when its process ends, however it ends.
    """
    left = []
    try:
        with os.scandir(directory) as entries:
            found = [Path(entry.path) for entry in entries if _LEFTOVER.fullmatch(entry.name)]
    except OSError:
        return []  # whoever writes there next says so
    for path in found:
        with contextlib.suppress(OSError):
            state = path.lstat()
            young = time.time() - state.st_mtime < LOCKED_WITHIN
            if stat.S_ISREG(state.st_mode) and not young and not _is_locked(path):
                path.unlink()
                left.append(path)
    return left


def _is_locked(path: Path) -> bool:
    with path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def write_json(path: Path, document: Any) -> None:
    """`write_text` of `json_text`."""
    write_text(path, json_text(document))


def json_text(document: Any) -> str:
    """JSON with two-space indentation, keys in the order given, a newline at the end.

    Raises:
        ValueError: it holds a NaN or an infinity, which JSON does not have.
    """
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def json_line(value: Any) -> str:
    """JSON on one line without blanks, a newline at the end; raises as `json_text` does."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=COMPACT) + "\n"


@dataclass(frozen=True)
class Lines:
    """How an object or a list is spread over lines.

    Attributes:
        indent: blanks before each member, which gets a line of its own; None keeps the members on one line, but asks
            for the layout of each.
        first: whether a line break follows the opening bracket.
        closing: blanks before the closing bracket, which gets a line of its own; None puts it behind the last member.
    """

    indent: int | None
    first: bool = True
    closing: int | None = None


#: Keys from the document down to a value ("*" for an item of a list), and the value -> how it is spread; None for one
#: line.
Layout = Callable[[tuple[str, ...], Any], Lines | None]


def laid_out(document: Any, layout: Layout, separators: tuple[str, str] = SPACED) -> str:
    """JSON in a layout of its own, so diffs of large files stay small and readable. A newline stands at the end.

    Args:
        document: what ``json.dumps`` takes.
        layout: which objects and lists are spread over lines. Empty ones never are.
        separators: between members and after keys where they stand on one line; after a key that begins a line there
            is always a blank.

    Raises:
        ValueError: it holds a NaN or an infinity, which JSON does not have.
    """
    return _laid_out(document, (), layout, separators) + "\n"


def _laid_out(value: Any, path: tuple[str, ...], layout: Layout, separators: tuple[str, str]) -> str:
    lines = layout(path, value) if value and isinstance(value, (dict, list)) else None
    if lines is None:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=separators)
    if isinstance(value, dict):
        colon = separators[1] if lines.indent is None else ": "
        members = [
            f"{json.dumps(key, ensure_ascii=False)}{colon}{_laid_out(member, (*path, key), layout, separators)}"
            for key, member in value.items()
        ]
    else:
        members = [_laid_out(item, (*path, "*"), layout, separators) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    if lines.indent is None:
        return opening + separators[0].join(members) + closing
    line = "\n" + " " * lines.indent
    end = "" if lines.closing is None else "\n" + " " * lines.closing
    return opening + (line if lines.first else "") + f",{line}".join(members) + end + closing
