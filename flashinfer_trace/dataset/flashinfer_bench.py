"""Names that flashinfer-bench's dataset uses too, and whether a Definition means the same by them.

``schema/flashinfer_bench.json`` holds the facts about its Definitions: op_type, axes, inputs, outputs and the constants
of their references, at one commit. ``schema/compatibility.json`` holds what people decided about them: the differences
that are kept, with the reason, and what this dataset has under another name or not at all.

Nothing here imports torch.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import TRACES, JsonSourceError, load_object
from flashinfer_trace.format.json_values import strings

#: Constants of a reference that decide what it computes. Sizes are axes, and the rest is how it computes.
CONSTANTS = frozenset({"EPS", "TOP_K", "N_GROUP", "TOPK_GROUP"})
#: Sections of schema/compatibility.json.
SECTIONS = ("differences", "behavior", "elsewhere", "missing", "evaluation")


class CompatibilityError(ValueError):
    """schema/flashinfer_bench.json or schema/compatibility.json is malformed. The message says where and why."""


@dataclass(frozen=True)
class Difference:
    """One fact in which two Definitions of the same name differ.

    Attributes:
        place: JSON pointer of the fact, such as ``/inputs/A/dtype``; constants are at ``/constants/<NAME>``.
        theirs, ours: the two values; None where there is none.
    """

    place: str
    theirs: Any
    ours: Any


@dataclass(frozen=True)
class Compatibility:
    """The facts and the decisions.

    Attributes:
        source: repository, folder, commit (40 hex digits) and its date.
        definitions: its Definitions by name: op_type, axes, inputs, outputs, constants.
        decisions: the sections of schema/compatibility.json.
    """

    source: Mapping[str, str]
    definitions: Mapping[str, Mapping[str, Any]]
    decisions: Mapping[str, Sequence[Mapping[str, Any]]]

    def kept(self, name: str) -> dict[str, str]:
        """Place -> reason of the differences that the Definition `name` may have."""
        return {one["place"]: one["reason"] for one in matching(self.decisions["differences"], name)}

    def unexpected(self, data: Mapping[str, Any]) -> list[Difference]:
        """Differences of a Definition from the one of the same name there, except those that are kept on purpose."""
        name = data.get("name")
        theirs = self.definitions.get(name) if isinstance(name, str) else None
        if theirs is None or not isinstance(name, str):
            return []
        kept = self.kept(name)
        return [one for one in differences(theirs, data) if one.place not in kept]


def matching(entries: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """The entries of a section whose ``names``, which may be globs, match `name`."""
    return [entry for entry in entries if any(fnmatch.fnmatchcase(name, pattern) for pattern in entry["names"])]


def differences(theirs: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Difference]:
    """Where a Definition does not take the workloads and solutions of an entry of the table, or computes otherwise.

    Const axes that only ours declares do not count as a difference: workloads give the values of var axes alone. The
    order of axes does not matter either; that of inputs and outputs does.
    """
    if theirs["op_type"] != data["op_type"]:
        yield Difference("/op_type", theirs["op_type"], data["op_type"])
    ours = {name: axis.get("value", "var") for name, axis in data["axes"].items()}
    for name in dict.fromkeys([*theirs["axes"], *ours]):
        own = isinstance(ours.get(name), int) and name not in theirs["axes"]
        if theirs["axes"].get(name) != ours.get(name) and not own:
            yield Difference(f"/axes/{name}", theirs["axes"].get(name), ours.get(name))
    for section in ("inputs", "outputs"):
        if list(theirs[section]) != list(data[section]):
            yield Difference(f"/{section}", list(theirs[section]), list(data[section]))
        for name in theirs[section]:
            for key in ("shape", "dtype") if name in data[section] else ():
                if theirs[section][name][key] != data[section][name][key]:
                    place = f"/{section}/{name}/{key}"
                    yield Difference(place, theirs[section][name][key], data[section][name][key])
    constants = constants_of(data["reference"])
    for name, value in theirs["constants"].items():
        if constants.get(name) != value:
            yield Difference(f"/constants/{name}", value, constants.get(name))


def constants_of(reference: str) -> dict[str, int | float]:
    """The `CONSTANTS` that a reference sets, in a function or outside; empty if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(reference)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        target.id: node.value.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, (int, float))
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in CONSTANTS
    }


def table_path(root: Path) -> Path:
    """Where the facts lie under a dataset root."""
    return root / "schema" / "flashinfer_bench.json"


def compatibility_path(root: Path) -> Path:
    """Where the decisions lie under a dataset root."""
    return root / "schema" / "compatibility.json"


def load_compatibility(root: Path) -> Compatibility | None:
    """Reads both files (cached until one changes); None if the root has no table: then every name is free.

    Raises:
        CompatibilityError: one of them is malformed, or only the decisions are missing.
    """
    paths = table_path(root), compatibility_path(root)
    if not paths[0].exists():
        return None
    try:
        return _load(*paths, *(path.stat().st_mtime_ns for path in paths))
    except OSError as error:
        raise CompatibilityError(f"{error.filename}: cannot be read ({error.strerror})") from None


@functools.lru_cache(maxsize=8)
def _load(table: Path, decisions: Path, _table_modified: int, _decisions_modified: int) -> Compatibility:
    try:
        facts, decided = load_object(table, TRACES), load_object(decisions)
        sections = {name: list(decided[name]) for name in SECTIONS}
        for section in ("differences", "behavior"):
            for entry in sections[section]:
                strings([*strings(entry["names"]), entry["reason"]])
        for entry in sections["differences"]:
            strings([entry["place"]])
        for definition in facts["definitions"].values():
            for section in ("axes", "inputs", "outputs", "constants"):
                definition[section].items()
            for tensor in (*definition["inputs"].values(), *definition["outputs"].values()):
                _ = tensor["shape"], tensor["dtype"]
            strings([definition["op_type"]])
        return Compatibility(facts["source"], facts["definitions"], sections)
    except (JsonSourceError, KeyError, TypeError, AttributeError) as error:
        where = f"{table.name} or {decisions.name}"
        raise CompatibilityError(f"{where} is malformed ({error!r}); their schemas are next to them") from None
