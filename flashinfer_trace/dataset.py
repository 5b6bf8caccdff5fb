"""Finds and loads Definitions, from a checkout or from the installed package."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from flashinfer_trace import json_source
from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.files import UnreadableFile, read_text

__all__ = [
    "DatasetError",
    "closest",
    "definition_of",
    "definition_paths",
    "definitions",
    "enclosing_checkout",
    "find_root",
    "load",
]

#: Points the library at another dataset: a directory with definitions/, schema/, reference/ and evidence/.
ROOT_VARIABLE = "FLASHINFER_TRACE_ROOT"
#: The directory of the imported package.
PACKAGE = Path(__file__).resolve().parent
#: Files of one kind that stay in memory. With room for fewer than a dataset has, each pass over it reads all of them
#: again: the file needed next is always the one that was dropped.
CACHED_FILES = 1 << 16
#: Identifies the pyproject.toml of a checkout. A regular expression, because a TOML parser would slow down the import.
_PROJECT = re.compile(r'^name\s*=\s*"flashinfer-trace"\s*$', re.MULTILINE)


class DatasetError(LookupError):
    """There is no dataset, or no such Definition. The message names the place searched and the closest names."""


def find_root() -> Path:
    """The dataset root: a directory that contains ``definitions/``, ``schema/``, ``reference/`` and ``evidence/``.

    ``$FLASHINFER_TRACE_ROOT`` if it is set. Otherwise the first of these that exists: in an editable install, the
    checkout that contains the current directory; the checkout that the package is imported from; the copy in the wheel.

    Raises:
        DatasetError: none of them contains a dataset.
    """
    override = os.environ.get(ROOT_VARIABLE)
    candidates = [Path(os.path.realpath(override))] if override else [PACKAGE.parent, PACKAGE / "data"]
    for candidate in candidates:
        if _is_dataset(candidate):
            editable = candidate == PACKAGE.parent and not override
            return (enclosing_checkout() or candidate) if editable else candidate
    looked = ", ".join(str(c) for c in candidates)
    raise DatasetError(f"no dataset (definitions/ and schema/) in {looked}; set {ROOT_VARIABLE} or reinstall")


def enclosing_checkout() -> Path | None:
    """The checkout of this project that contains the current directory, if any."""
    try:
        here = Path.cwd()
    except OSError:  # the current directory was removed
        return None
    return next((directory for directory in (here, *here.parents) if _is_checkout(directory)), None)


def _is_dataset(directory: Path) -> bool:
    return (directory / "definitions").is_dir() and (directory / "schema").is_dir()


def _is_checkout(directory: Path) -> bool:
    try:
        return _is_dataset(directory) and bool(_PROJECT.search(read_text(directory / "pyproject.toml")))
    except UnreadableFile:
        return False


def definition_paths(root: Path | None = None, op_type: str | None = None) -> list[Path]:
    """Every Definition file of the dataset, sorted; only those of `op_type` if it is given."""
    return sorted((root or find_root()).glob(f"definitions/{op_type or '*'}/*.json"))


def load(name: str, root: Path | None = None) -> Definition:
    """The Definition with this name.

    Raises:
        DatasetError: there is none; the message suggests the closest names.
        InputError: its file is not a Definition, or is one that belongs elsewhere.
    """
    root = root or find_root()
    for directory in (root / "definitions").glob("*"):  # not by `definition_paths`, which reads all of them
        path = directory / f"{name}.json"
        if path.stem == name and os.path.lexists(path):
            return _read(path, _modified(path))
    names = [path.stem for path in definition_paths(root)]
    hint = closest(name, names) or "`flashinfer-trace list` shows all names"
    raise DatasetError(f"no Definition named {name!r} among {len(names)} in {root / 'definitions'}; {hint}")


def definition_of(given: Definition | str) -> Definition:
    """A Definition that is given, or the one of this name.

    Raises:
        InputError: what is given is neither.
        DatasetError, InputError: see `load`.
    """
    if isinstance(given, Definition):
        return given
    if isinstance(given, str):
        return load(given)
    raise InputError(f"a {type(given).__name__} is no Definition; give one, or its name")


def closest(word: str, known: Iterable[str]) -> str:
    """A question that suggests the closest known words (``did you mean ...?``); empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def definitions(op_type: str | None = None, tag: str | None = None, root: Path | None = None) -> Iterator[Definition]:
    """Definitions in order of op_type and name.

    Args:
        op_type: only this op_type, for example ``gemm``.
        tag: only Definitions that carry this tag, for example ``status:verified``.

    Raises:
        DatasetError: no Definition has this op_type; the message suggests the closest ones.
        InputError: a file is not a Definition, or is one that belongs elsewhere.
    """
    root = root or find_root()
    if op_type is not None and not (root / "definitions" / op_type).is_dir():
        known = sorted(path.name for path in (root / "definitions").iterdir() if path.is_dir())
        raise DatasetError(f"no op_type {op_type!r}; {closest(op_type, known) or 'there are ' + ', '.join(known)}")
    for path in definition_paths(root, op_type):
        definition = _read(path, _modified(path))
        if tag is None or tag in definition.tags:
            yield definition


def _modified(path: Path) -> int:
    """When a file was changed last, in nanoseconds; 0 if that cannot be told: reading it then says why."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=CACHED_FILES)
def _read(path: Path, _changed: int) -> Definition:
    definition = Definition.from_file(path)
    if (definition.op_type, definition.name) != (path.parent.name, path.stem):
        # Whatever reads it would speak of another Definition than the one that was asked for.
        field = "name" if definition.name != path.stem else "op_type"
        belongs = f"definitions/{definition.op_type}/{definition.name}.json"
        fix = f"correct {field} there, or move the file"
        raise InputError(f"{path}:{json_source.load(path).line_of(f'/{field}')}: it belongs at {belongs}; {fix}")
    return definition
