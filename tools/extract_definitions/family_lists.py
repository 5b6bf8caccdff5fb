"""Keeps models/curated/family_tags.json in step with what extraction writes, also for sizes that no list there names.

Some kernels and tags are those of a few Definitions of a family, which `only` and `without` name. For a new Definition,
the recipe decides and the lists gain its name. Which kernels compute an existing one, the lists decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import Any

from flashinfer_trace.files import Lines, laid_out
from flashinfer_trace.json_source import load_object
from flashinfer_trace.kernel_paths import KINDS, Claimable
from flashinfer_trace.model_claims import FamilyTags, ModelClaims, family_tags_path

#: Namespaces that do not follow from the family.
OTHERS = ("status", "model", "tp", "ep")

#: A group of Definitions, and a kernel or tag of it: ("kernels" or "tags", value).
Group = dict[str, list[str]]
Item = tuple[str, str]


class FamilyLists:
    """The groups of all families, and the names that they gain.

    Args:
        root: the dataset root.
        claims: what models/ says there; None if it says nothing: then families give no tags.

    Attributes:
        path: the file.
        changed: the Definitions whose names the lists gain or lose.
    """

    def __init__(self, root: Path, claims: ModelClaims | None) -> None:
        self.path = family_tags_path(root)
        exists = claims is not None and self.path.exists()
        self.document: dict[str, Any] = load_object(self.path) if exists else {"families": {}}
        self.changed: dict[str, None] = {}

    @property
    def text(self) -> str:
        """The file with the names that it gains."""
        return laid_out(self.document, _lines)

    def created(self, name: str, family: str, tags: Iterable[str], kernels: Claimable, all_stages: bool) -> set[str]:
        """The tags of a new Definition: those of its recipe, and the kernels that the family has at all sizes.

        Args:
            name: its name.
            family: its family.
            tags: those of the recipe.
            kernels: what its tags may say of kernels.
            all_stages: whether `tags` name every stage that calls it; otherwise it gets those of the family as well.
        """
        groups = self.document["families"].get(family)
        if groups is None:
            return set(tags)
        wanted, given = _items(tags), _given(groups, name)
        unwanted = {one for one in given - wanted if one[0] == "tags" and (all_stages or not _is_stage(one))}
        for item in sorted(unwanted):
            _exclude(groups, name, item)
        return self._settled(groups, name, tags, wanted - given, kernels, bool(unwanted))

    def merged(self, name: str, family: str, tags: Iterable[str], kernels: Claimable) -> set[str]:
        """The tags of an existing Definition: `tags`, with exactly the kernels that the family gives it."""
        groups = self.document["families"].get(family)
        if groups is None:
            return set(tags)
        missing = {one for one in _items(tags) - _given(groups, name) if one[0] == "tags"}
        return self._settled(groups, name, tags, missing, kernels)

    def _settled(
        self,
        groups: list[Group],
        name: str,
        tags: Iterable[str],
        missing: Set[Item],
        kernels: Claimable,
        changed: bool = False,
    ) -> set[str]:
        """What the family gives after its lists gained what is missing, and the tags that follow from elsewhere."""
        for item in sorted(missing):
            _include(groups, name, item, _items(tags))
        if missing or changed:
            self.changed[name] = None
        given = _given(groups, name)
        found = {value for kind, value in given if kind == "tags"}
        found |= kernels.tags(value for kind, value in given if kind == "kernels")
        return found | {tag for tag in tags if tag.partition(":")[0] in OTHERS}


def _items(tags: Iterable[str]) -> set[Item]:
    """The kernels and tags that follow from the family."""
    found = set()
    for tag in tags:
        namespace, _, value = tag.partition(":")
        if namespace not in OTHERS:
            found.add(("kernels", value) if namespace in KINDS else ("tags", tag))
    return found


def _items_of(group: Group) -> set[Item]:
    return {(kind, value) for kind in ("kernels", "tags") for value in group.get(kind, ())}


def _given(groups: Iterable[Group], name: str) -> set[Item]:
    """What the groups give to a Definition."""
    return set().union(*(_items_of(group) for group in groups if _covers(group, name)))


def _covers(group: Group, name: str) -> bool:
    only, without = tuple(group.get("only", ())), tuple(group.get("without", ()))
    return FamilyTags(frozenset(), frozenset(), only, without).covers(name)


def _is_stage(item: Item) -> bool:
    return item[1].startswith("stage:")


def _include(groups: list[Group], name: str, item: Item, wanted: Set[Item]) -> None:
    """Names a Definition in a group that gives it this and nothing that it does not have; in a new one if none fits."""
    for group in groups:
        if item in _items_of(group) and _items_of(group) <= wanted and ("only" in group or "without" in group):
            changed = {key: [one for one in names if one != name] for key, names in group.items()}
            if "only" in group:
                changed["only"] = sorted([*changed["only"], name])
            if _covers(changed, name):
                _replace(groups, group, changed)
                return
    kind, value = item
    groups.append({"only": [name], kind: [value]})


def _exclude(groups: list[Group], name: str, item: Item) -> None:
    """Takes this from a Definition: its group no longer names it, or excepts it."""
    kind, value = item
    for group in [one for one in groups if item in _items_of(one) and _covers(one, name)]:
        rest: Group = {**group, kind: [one for one in group[kind] if one != value]}
        chosen: Group = {key: [one for one in group[key] if one != name] for key in ("only", "without") if key in group}
        apart: Group = {**chosen, kind: [value]}
        if _covers(apart, name) and apart.get("only") != []:
            apart["without"] = sorted([*apart.get("without", []), name])
        parts = [rest, apart] if apart.get("only") != [] else [rest]  # [] if the group named no other
        _replace(groups, group, *(one for one in parts if _items_of(one)))


def _replace(groups: list[Group], old: Group, *new: Group) -> None:
    """Puts groups in the place of another, without empty lists."""
    place = groups.index(old)
    for number, one in enumerate(new):
        kept: Group = {key: one[key] for key in ("only", "without", "kernels", "tags") if one.get(key)}
        groups.insert(place + 1 + number, kept)
    del groups[place]


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    return {0: Lines(2, closing=0), 1: Lines(4, closing=2), 2: Lines(6, closing=4)}.get(len(path))
