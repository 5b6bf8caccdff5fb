"""Labelled calls: reads them, and checks whether they match the sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tools.resolver_benchmark.defined_names import DefinedNames, calls_of

LABELS = Path(__file__).resolve().parents[2] / "tests" / "resolver_benchmark" / "labels"
NO_LABELS = {"peers.json"}  # figures, stored next to the labels

Query: TypeAlias = tuple[str, int, str]
"""(file relative to the sources, line of the call, `ast.unparse` of the called expression)"""


@dataclass(frozen=True)
class Label:
    """One labelled call.

    Attributes:
        file, line, call: the query.
        caller: qualified name of the enclosing function, "<module>" outside functions.
        callees: what the call can enter on CUDA in a DeepSeek model; empty for builtins, torch and pruned branches.
        also: callees that are neither required nor wrong; see the README of the labels.
        kind: "direct", "import", "method", "builtin", or the kind of dynamic hop.
        note: the reason for the label.
    """

    file: str
    line: int
    call: str
    caller: str
    callees: frozenset[str]
    kind: str
    note: str
    also: frozenset[str] = frozenset()

    @property
    def query(self) -> Query:
        return self.file, self.line, self.call


class LabelError(Exception):
    """A label file is invalid; the message names the file, the place and the fix."""


def read_labels(directory: Path) -> list[Label]:
    """All labels in a directory, sorted by file and line.

    Raises:
        LabelError: the directory has no labels, a label is malformed, or a call is labelled twice.
    """
    labels: dict[Query, Label] = {}
    for path in sorted(directory.glob("*.json")):
        if path.name in NO_LABELS:
            continue
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise LabelError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
        for position, entry in enumerate(entries):
            sets = {key: frozenset(entry[key]) for key in ("callees", "also") if key in entry}
            try:
                label = Label(**{**entry, **sets})
            except TypeError as error:
                raise LabelError(f"{path}: label {position}: {error}; see the README in this directory") from None
            if label.query in labels:
                raise LabelError(f"{path}: label {position}: {label.file}:{label.line} {label.call} is labelled twice")
            labels[label.query] = label
    if not labels:
        raise LabelError(f"{directory}: no labels (*.json) here")
    return list(labels.values())


def label_problems(labels: Iterable[Label], sources: Path) -> list[str]:
    """Labels that do not match: the call is not on its line, the caller is another one, or a callee is undefined."""
    problems = []
    known = DefinedNames(sources)
    calls: dict[str, dict[tuple[int, str], str]] = {}
    for label in labels:
        place = f"{label.file}:{label.line}"
        if label.file not in calls:
            path = sources / label.file
            calls[label.file] = calls_of(path.read_text(encoding="utf-8")) if path.is_file() else {}
        caller = calls[label.file].get((label.line, label.call))
        if caller is None:
            problems.append(f"{place}: no call of `{label.call}` starts on this line")
        elif caller != label.caller:
            problems.append(f"{place}: `{label.call}` is called in {caller}, not in {label.caller}")
        missing = [name for name in sorted(label.callees | label.also) if name not in known]
        problems += [f"{place}: {name} is not defined anywhere" for name in missing]
        problems += [f"{place}: {name} is in both callees and also" for name in sorted(label.callees & label.also)]
    return problems
