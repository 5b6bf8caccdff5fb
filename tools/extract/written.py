"""Writes the Definitions of new sizes. All are made and validated before the first one appears under its name."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.add import AddError, new_definition
from flashinfer_trace.dataset.validation import Problem, validate_paths
from flashinfer_trace.format.files import json_text, write_text
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.naming import family_name, load_naming
from flashinfer_trace.format.reference import render
from tools.extract.matched import Row, State

#: Rules about tags that `flashinfer-trace sync` sets.
OF_SYNC = {"tag-claim", "tag-missing", "tag-model", "tag-unfounded"}
#: Sections of a Definition that decide what it computes. Descriptions within them do not count.
CONTRACT = ("op_type", "axes", "constraints", "inputs", "outputs", "reference")


@dataclass(frozen=True)
class Planned:
    """The planned file of a Definition.

    Attributes:
        name: its name.
        path: where it is written; None if it cannot be made.
        text: the content of that file.
        conflict: why a person has to look at it; "" if nobody has to.
    """

    name: str
    path: Path | None
    text: str = ""
    conflict: str = ""

    def write(self) -> None:
        """Writes the file."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, self.text)


def planned(rows: Sequence[Row], root: Path, definitions: Path, deduplicate: bool) -> list[Planned]:
    """The Definitions of new sizes and, unless `deduplicate`, those that exist, again for review.

    Args:
        rows: the calls.
        root: the dataset root.
        definitions: the directory that is written to.
        deduplicate: whether an existing Definition meets a call; otherwise it is made again.
    """
    found: dict[str, Planned] = {}
    for row in rows:
        for name in row.definitions:
            if name in found:
                continue
            if row.state is State.NEW_SIZE:
                try:
                    found[name] = _placed(new_definition(root, *row.sizes[name]), definitions)
                except AddError as error:
                    found[name] = Planned(name, None, conflict=str(error))
            elif not deduplicate:
                found[name] = _placed(_again(root, name), definitions, again=True)
    return list(found.values())


def problems_of(plan: Sequence[Planned], root: Path) -> list[Problem]:
    """Problems that the validator finds in what is to be written, but not in what is for review.

    Those with tags that `flashinfer-trace sync` sets are left out.
    """
    with tempfile.TemporaryDirectory(prefix="flashinfer_trace_") as directory:
        for one in plan:
            if one.path is not None and not one.conflict:
                copy = Path(directory) / "definitions" / one.path.parent.name / one.path.name
                copy.parent.mkdir(exist_ok=True, parents=True)
                copy.write_text(one.text, encoding="utf-8")
        written = Path(directory) / "definitions"
        found = validate_paths([written], root).problems if written.exists() else []
        return [one for one in found if one.rule not in OF_SYNC]


def _again(root: Path, name: str) -> dict[str, Any]:
    """An existing Definition, with the reference that its family's source gives today."""
    (path,) = (root / "definitions").glob(f"*/{name}.json")
    data = load_object(path)
    family = family_name(data, load_naming(root))
    axes = {key: axis["value"] for key, axis in data["axes"].items() if axis["type"] == "const"}
    return data if family is None else {**data, "reference": render(root, data["op_type"], family, axes)}


def _placed(data: Mapping[str, Any], definitions: Path, again: bool = False) -> Planned:
    """Where a Definition goes: under its name or, if another one has that, into a file for review."""
    name, text = str(data["name"]), json_text(data)
    path = definitions / str(data["op_type"]) / f"{name}.json"
    if not path.exists():
        return Planned(name, path, text)
    existing = json.loads(path.read_text(encoding="utf-8"))
    different = [part for part in CONTRACT if _plain(existing.get(part)) != _plain(data[part])]
    if not different and not again:
        return Planned(name, None)
    version = 2
    while (review := path.with_name(f"{name}_v{version}.json.review")).exists() and review.read_text("utf-8") != text:
        version += 1
    why = f"differs in {', '.join(different)}" if different else "exists"
    return Planned(name, review, text, f"{why}; see {review.name}")


def _plain(value: Any) -> Any:
    """A section without its descriptions."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if key != "description"}
    return value
