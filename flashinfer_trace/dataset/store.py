"""Finds and loads Definitions: of the dataset, in a checkout or in the installed package, and of private roots."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from flashinfer_trace.format import json_source
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.roots import (
    PACKAGE,
    ROOT_VARIABLE,
    DatasetError,
    enclosing_checkout,
    find_root,
    find_roots,
)

__all__ = ["PACKAGE", "ROOT_VARIABLE", "DatasetError", "enclosing_checkout", "find_root", "find_roots"]

#: Files of one kind that stay in memory. With room for fewer than a dataset has, each pass over it reads all of them
#: again: the file needed next is always the one that was dropped.
CACHED_FILES = 1 << 16


def definition_paths(root: Path | None = None, op_type: str | None = None) -> list[Path]:
    """Every Definition file, sorted: of one root, or of all; only those of `op_type` if it is given.

    Raises:
        DatasetError: the dataset does not exist, or two roots have a Definition of one name.
    """
    if root is not None:
        return sorted(root.glob(f"definitions/{op_type or '*'}/*.json"))
    roots = find_roots()
    paths = [path for one in roots for path in definition_paths(one, op_type)]
    if len(roots) > 1:
        first: dict[str, Path] = {}
        for path in paths:
            if (other := first.setdefault(path.stem, path)) != path:
                raise _twice(other, path)
    return sorted(paths, key=lambda path: (path.parent.name, path.name))


def _twice(first: Path, second: Path) -> DatasetError:
    others = f"; if they are flashinfer-bench's, name {second.parent.parent} as the root"
    return DatasetError(f"{second}: {first} has that name too; rename one of them, or leave out one root{others}")


def root_of(path: Path) -> Path:
    """The root that a file or directory is in; the dataset's if it is in none."""
    resolved = Path(os.path.realpath(path))
    roots = find_roots()
    around = [root for root in roots if resolved.is_relative_to(os.path.realpath(root))]
    return max(around, key=lambda root: len(root.parts), default=roots[0])


def load(name: str, root: Path | None = None) -> Definition:
    """The Definition with this name, of one root or of any.

    Raises:
        DatasetError: there is none (the message suggests the closest names), or two roots have one.
        InputError: its file is not a Definition, or is one that belongs elsewhere.
    """
    roots = [root] if root is not None else find_roots()
    found = []
    for one in roots:
        for directory in (one / "definitions").glob("*"):  # not by `definition_paths`, which reads all of them
            path = directory / f"{name}.json"
            if path.stem == name and os.path.lexists(path):
                found.append(path)
                break
    if len(found) > 1:
        raise _twice(*found[:2])
    if found:
        return _read(found[0], _modified(found[0]))
    names = [path.stem for path in definition_paths(root)]
    hint = closest(name, names) or "`flashinfer-trace list` shows all names"
    places = ", ".join(str(one / "definitions") for one in roots)
    raise DatasetError(f"no Definition named {name!r} among {len(names)} in {places}; {hint}")


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
    raise InputError(f"a {type(given).__name__} is not a Definition; give one, or its name")


def closest(word: str, known: Iterable[str]) -> str:
    """A question that suggests the closest known words (``did you mean ...?``); empty if none is close."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else ""


def definitions(
    op_type: str | None = None, tag: str | Collection[str] = (), root: Path | None = None
) -> Iterator[Definition]:
    """Definitions in order of op_type and name: of one root, or of all.

    Args:
        op_type: only this op_type, for example ``gemm``.
        tag: only Definitions that carry this tag, for example ``status:verified``; or all of these tags.

    Raises:
        DatasetError: no Definition has this op_type; the message suggests the closest ones.
        InputError: a file is not a Definition, or is one that belongs elsewhere.
    """
    tags = {tag} if isinstance(tag, str) else {*tag}
    paths = definition_paths(root, op_type)
    if op_type is not None and not paths:
        known = sorted({path.parent.name for path in definition_paths(root)})
        raise DatasetError(f"no op_type {op_type!r}; {closest(op_type, known) or 'there are ' + ', '.join(known)}")
    for path in paths:
        definition = _read(path, _modified(path))
        if tags <= {*definition.tags}:
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
