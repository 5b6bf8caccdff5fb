"""Keeps the tags of families in schema/naming.json in step with what extraction writes.

Some tags are those of a few Definitions of a family, which `only` and `without` name. For a new Definition, the recipe
decides and the lists gain its name. What an existing one has, the lists decide. Kernels follow from the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.model_claims import ModelClaims
from flashinfer_trace.format.files import Lines, laid_out
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.naming import SomeTags
from flashinfer_trace.kernels.names import KINDS

#: Namespaces that do not follow from the family.
OTHERS = ("status", "model", "tp", "ep", *KINDS)
#: Longest line of the file, if it can be.
WIDTH = 120

#: A group of Definitions, and their tags: "tags", and "only" or "without" unless all have them.
Group = dict[str, list[str]]


class FamilyLists:
    """The tags of all families, and the names that their lists gain.

    Args:
        root: the dataset root.
        claims: what models/ says there; None if it says nothing: then families give no tags.

    Attributes:
        path: the file.
        changed: the Definitions whose names the lists gain or lose.
    """

    def __init__(self, root: Path, claims: ModelClaims | None) -> None:
        self.path = root / "schema" / "naming.json"
        self.document: dict[str, Any] = load_object(self.path) if claims is not None else {"families": {}}
        self.changed: dict[str, None] = {}

    @property
    def text(self) -> str:
        """The file with the names that it gains."""
        return laid_out(self.document, _lines)

    def created(self, name: str, family: str, tags: Iterable[str], all_stages: bool) -> set[str]:
        """The tags of a new Definition: those of its recipe, and of its kernels.

        Args:
            name: its name.
            family: its family.
            tags: those of the recipe.
            all_stages: whether `tags` name every stage that calls it; otherwise it gets those of the family as well.
        """
        if family not in self.document["families"]:
            return set(tags)
        groups = self._groups(family)
        wanted, given = _of_family(tags), _given(groups, name)
        unwanted = {tag for tag in given - wanted if all_stages or not tag.startswith("stage:")}
        for tag in sorted(unwanted):
            _exclude(groups, name, tag)
        return self._settled(family, groups, name, tags, wanted - given, bool(unwanted))

    def merged(self, name: str, family: str, tags: Iterable[str]) -> set[str]:
        """The tags of an existing Definition: `tags`, all of which its family gives it from now on."""
        if family not in self.document["families"]:
            return set(tags)
        groups = self._groups(family)
        return self._settled(family, groups, name, tags, _of_family(tags) - _given(groups, name))

    def _groups(self, family: str) -> list[Group]:
        entry = self.document["families"][family]
        own = [{"tags": list(entry["tags"])}] if "tags" in entry else []
        return own + [{key: list(values) for key, values in one.items()} for one in entry.get("some_tags", [])]

    def _settled(
        self, family: str, groups: list[Group], name: str, tags: Iterable[str], missing: Set[str], changed: bool = False
    ) -> set[str]:
        """What the family gives after its lists gained what is missing, and the tags that follow from elsewhere."""
        for tag in sorted(missing):
            _include(groups, name, tag, _of_family(tags))
        if missing or changed:
            self.changed[name] = None
            entry = {key: one for key, one in self.document["families"][family].items() if "tags" not in key}
            of_all = [tag for one in groups if one.keys() == {"tags"} for tag in one["tags"]]
            some = [one for one in groups if one.keys() != {"tags"}]
            entry |= {key: one for key, one in (("tags", of_all), ("some_tags", some)) if one}
            self.document["families"][family] = entry
        return _given(groups, name) | {tag for tag in tags if tag.partition(":")[0] in OTHERS}


def _of_family(tags: Iterable[str]) -> set[str]:
    """The tags that follow from the family."""
    return {tag for tag in tags if tag.partition(":")[0] not in OTHERS}


def _given(groups: Iterable[Group], name: str) -> set[str]:
    """What the groups give to a Definition."""
    return set[str]().union(*(group["tags"] for group in groups if _covers(group, name)))


def _covers(group: Group, name: str) -> bool:
    return SomeTags(frozenset(), tuple(group.get("only", ())), tuple(group.get("without", ()))).covers(name)


def _include(groups: list[Group], name: str, tag: str, wanted: Set[str]) -> None:
    """Names a Definition in a group that gives it this and nothing that it does not have; in a new one if none fits."""
    for group in groups:
        if tag in group["tags"] and set(group["tags"]) <= wanted and ("only" in group or "without" in group):
            changed = {key: [one for one in names if one != name] for key, names in group.items()}
            if "only" in group:
                changed["only"] = sorted([*changed["only"], name])
            if _covers(changed, name):
                _replace(groups, group, changed)
                return
    groups.append({"tags": [tag], "only": [name]})


def _exclude(groups: list[Group], name: str, tag: str) -> None:
    """Takes this from a Definition: its group no longer names it, or excepts it."""
    for group in [one for one in groups if tag in one["tags"] and _covers(one, name)]:
        rest: Group = {**group, "tags": [one for one in group["tags"] if one != tag]}
        chosen: Group = {key: [one for one in group[key] if one != name] for key in ("only", "without") if key in group}
        apart: Group = {"tags": [tag], **chosen}
        if _covers(apart, name) and apart.get("only") != []:
            apart["without"] = sorted([*apart.get("without", []), name])
        parts = [rest, apart] if apart.get("only") != [] else [rest]  # [] if the group named no other
        _replace(groups, group, *(one for one in parts if one["tags"]))


def _replace(groups: list[Group], old: Group, *new: Group) -> None:
    """Puts groups in the place of another, without empty lists."""
    place = groups.index(old)
    groups[place : place + 1] = [{key: one[key] for key in ("tags", "only", "without") if one.get(key)} for one in new]


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    """One line where it fits."""
    depth = len(path)
    key = len(path[-1]) + len('"": ') if path and path[-1] != "*" else 0
    if depth > 1 and 2 * depth + key + len(json.dumps(value, ensure_ascii=False)) < WIDTH:
        return None
    return Lines(2 * depth + 2, closing=2 * depth)
