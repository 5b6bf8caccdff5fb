"""Finds the files to check, and reports what lies among them that does not belong."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from flashinfer_trace.dataset.validation.problems import Findings


class DatasetFiles:
    """The files under one dataset root."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))

    @property
    def definitions(self) -> Path:
        return self.root / "definitions"

    @property
    def evidence(self) -> Path:
        return self.root / "evidence"

    @property
    def runs(self) -> Path:
        """The headers of the runs of evidence."""
        return self.evidence / "runs"

    def suffix(self, directory: Path) -> str:
        """How the names of files end in a directory: evidence has a line for each run."""
        lines = self.is_below(directory, self.evidence) and not self.is_below(directory, self.runs)
        return ".jsonl" if lines else ".json"

    def locate(self, path: Path) -> Path:
        """`path` made absolute. Symbolic links are resolved around it, but not the path itself."""
        absolute = Path(os.path.abspath(path))
        try:
            if os.path.realpath(absolute) == str(self.root):
                return self.root
            if self.root in absolute.parents:
                return absolute
            return Path(os.path.realpath(absolute.parent)) / absolute.name
        except (OSError, ValueError):  # a null byte: json_files reports it
            return absolute

    def is_below(self, path: Path, directory: Path) -> bool:
        """Whether `path` is `directory` or inside it."""
        return path == directory or directory in path.parents

    def json_files(self, path: Path, findings_of: Callable[[Path], Findings]) -> Iterator[Path]:
        """JSON files at or below `path`, sorted. Symbolic links are reported, never followed."""
        try:
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                findings_of(path).add("file-kind", "is a symbolic link", "replace it by the file itself")
                return
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            findings_of(path).add("file-unreadable", f"cannot be read: {reason}", "check the path")
            return
        if not stat.S_ISDIR(mode):
            yield path
            return
        if path.suffix == self.suffix(path.parent):
            findings_of(path).add("file-kind", "is a directory, not a file", "remove it or rename it")
            return
        queue = [path]
        while queue:
            yield from self._entries(queue.pop(), queue, findings_of)

    def _entries(self, directory: Path, queue: list[Path], findings_of: Callable[[Path], Findings]) -> Iterator[Path]:
        try:
            with os.scandir(directory) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            findings_of(directory).add("file-unreadable", f"cannot be read: {error.strerror}", "check its permissions")
            return
        for entry in entries:
            path, suffix = directory / entry.name, self.suffix(directory)
            if entry.is_symlink():
                findings_of(path).add("file-kind", "is a symbolic link", "replace it by the file itself")
            elif path.suffix == suffix and not entry.is_file(follow_symlinks=False):
                if entry.is_dir(follow_symlinks=False):
                    findings_of(path).add("file-kind", "is a directory, not a file", "remove it or rename it")
                else:  # the words of json_source.load, so the problem is reported once
                    findings_of(path).add("file-kind", "is not a regular file", "replace it by a plain file")
            elif entry.is_dir(follow_symlinks=False):
                queue.append(path)
            elif path.suffix == suffix:
                yield path
            elif path.suffix == ".review":
                hint = "take over what is right, then remove it"
                findings_of(path).add("file-unexpected", "is a conflict that extraction left for review", hint)
            else:
                hint = "one Definition a file, <name>.json; its evidence is <name>.jsonl"
                findings_of(path).add("file-unexpected", f"is not a {suffix} file", hint)

    @cached_property
    def stems(self) -> dict[str, list[Path]]:
        """Files of definitions/<op_type>/ by stem, for finding two Definitions of one name."""
        found: dict[str, list[Path]] = {}
        for path in sorted(self.definitions.glob("*/*.json")):
            found.setdefault(path.stem, []).append(path)
        return found
