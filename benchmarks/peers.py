"""References of another dataset in flashinfer-bench's format, for the Definitions that have the same name here.

They come as the other dataset has them. Nobody runs a file that was only downloaded, so they are held to the same
syntax, torch functions and names as ours; that they may leave ties to torch, and memory undefined until they fill it,
is a question of their results.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace import Definition, load
from flashinfer_trace.format.allow_list import allowed, static
from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.reference import ReferenceSourceError, load_run

__all__ = ["Peer", "peers"]

#: An op_type whose references may begin with undefined memory.
UNDEFINED_MEMORY = min(allowed.DRAWING_OP_TYPES)


@dataclass(frozen=True)
class Peer:
    """A Definition of the other dataset whose name is one of ours.

    Attributes:
        name: of both.
        run: its reference, by our inputs; None if it cannot be compared.
        reason: why not; empty if it can.
    """

    name: str
    run: Callable[[Mapping[str, Any]], Any] | None
    reason: str


def peers(directory: Path, names: set[str]) -> Iterator[Peer]:
    """The Definitions under a directory whose names are among `names`, by name.

    Raises:
        FileNotFoundError: the directory has no Definition of these names.
    """
    paths = {path.stem: path for path in sorted(directory.rglob("*.json")) if path.stem in names}
    if not paths:
        raise FileNotFoundError(f"{directory}: no file named after one of our Definitions (<name>.json)")
    for name, path in sorted(paths.items()):
        try:
            yield peer(load(name), path)
        except (JsonSourceError, ReferenceSourceError, SyntaxError, KeyError, TypeError, AttributeError) as error:
            yield Peer(name, None, f"cannot be read: {' '.join(str(error).split())[:160]}")


def peer(ours: Definition, path: Path) -> Peer:
    """The other Definition in one file, if it takes inputs of the same names and dtypes as ours."""
    theirs = load_object(path)
    if theirs["name"] != ours.name:
        return Peer(ours.name, None, f"its name is {theirs['name']}")
    given = {name: spec["dtype"] for name, spec in theirs["inputs"].items()}
    own = {name: spec.dtype for name, spec in ours.inputs.items()}
    different = sorted(name for name in given.keys() | own.keys() if given.get(name) != own.get(name))
    if different:
        return Peer(ours.name, None, f"other inputs: {', '.join(different)}")
    run = compiled(str(theirs["reference"]), str(path))
    return Peer(ours.name, lambda inputs: run(*(inputs[name] for name in given)), "")


def compiled(source: str, label: str) -> Callable[..., Any]:
    """The ``run`` of a reference that uses allowed syntax and names only.

    Raises:
        SyntaxError: it is not Python.
        ReferenceSourceError: it uses something else, or defines no ``run``.
    """
    found = static.check(ast.parse(source), symtable.symtable(source, label, "exec"), UNDEFINED_MEMORY)
    for violation in found:
        if violation.rule not in ("reference-ties", "reference-undetermined"):
            raise ReferenceSourceError(f"{label}:{violation.line}: {violation.message} ({violation.hint})")
    return load_run(source, label)
