"""Names of Definitions: the family that a name belongs to, and the name that the const axes determine.

The conventions are data in ``schema/naming.json``, so other tools can use them. Importing this module does not
import torch.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_trace.format.json_source import JsonSourceError, load_object
from flashinfer_trace.format.json_values import strings
from flashinfer_trace.format.patterns import check_pattern, fits
from flashinfer_trace.format.roots import find_root, find_roots, is_private

#: Longest name of a family, an op_type or a Definition, as in schema/definition.schema.json.
MAX_NAME = 160
_PLACEHOLDER = re.compile(r"\{([A-Za-z][A-Za-z0-9_]*)\}")
#: One underscore-separated part of a pattern that holds a placeholder: an abbreviation, then the placeholder.
_PART = re.compile(r"(?P<abbreviation>[a-z]*)\{(?P<axis>[A-Za-z][A-Za-z0-9_]*)\}(?P<rest>.*)")
#: No leading zeros (they would give one Definition two names) and no more digits than an axis can have.
_INTEGER = "(0|[1-9][0-9]{0,18})"


class NamingError(ValueError):
    """schema/naming.json is missing or malformed, or a name cannot be derived. The message says where and why."""


@dataclass(frozen=True)
class SomeTags:
    """Tags that some Definitions of a family have.

    Attributes:
        tags: the tags.
        only: names or globs of the Definitions that have them; empty for all.
        without: names or globs of Definitions that do not.
    """

    tags: frozenset[str]
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def covers(self, definition: str) -> bool:
        """Whether a Definition of the family has them."""
        chosen = not self.only or _globs(self.only).fullmatch(definition)
        return bool(chosen) and not (self.without and _globs(self.without).fullmatch(definition))


@dataclass(frozen=True)
class NamePattern:
    """One family of Definitions.

    Attributes:
        name: the family's name, also the stem of its file in ``reference/<op_type>/``.
        op_type: op_type of its Definitions.
        pattern: the name, with a placeholder ``{axis}`` for each const axis in it.
        where: const axes that must have exactly these values.
        exceptions: (``where``, pattern) of the sizes whose names follow another pattern. The first that holds decides.
        tags: those of its Definitions except kernels, status, and models.
    """

    name: str
    op_type: str
    pattern: str
    where: tuple[tuple[str, int], ...] = ()
    exceptions: tuple[tuple[tuple[tuple[str, int], ...], str], ...] = ()
    tags: tuple[SomeTags, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Const axes that the pattern or ``where`` reads."""
        return (*_PLACEHOLDER.findall(self.pattern), *(axis for axis, _ in self.where))

    def pattern_for(self, const_axes: Mapping[str, int]) -> str:
        """The pattern of the name of a Definition with these const axes."""
        for where, pattern in self.exceptions:
            if all(const_axes.get(axis) == value for axis, value in where):
                return pattern
        return self.pattern

    def tags_of(self, definition: str) -> frozenset[str]:
        """The tags of a Definition of the family, by its name, except kernels, status, and models."""
        return frozenset[str]().union(*(some.tags for some in self.tags if some.covers(definition)))

    def may_have(self, name: str) -> bool:
        """Whether a Definition of this name can belong to the family; its axes decide (see `matches`)."""
        patterns = dict.fromkeys((self.pattern, *(pattern for _, pattern in self.exceptions)))
        return any(_pattern_regex(pattern).fullmatch(name) for pattern in patterns)

    def matches(self, name: str, op_type: str, const_axes: Mapping[str, int]) -> bool:
        """Whether a Definition with this name, op_type and const axes belongs to the family."""
        if op_type != self.op_type or any(const_axes.get(axis) != value for axis, value in self.where):
            return False
        for pattern in dict.fromkeys((self.pattern, *(pattern for _, pattern in self.exceptions))):
            if (match := _pattern_regex(pattern).fullmatch(name)) is not None:
                # Exceptions are about the sizes in the name, which a small twin keeps, not about its axes.
                sizes = dict(zip(_PLACEHOLDER.findall(pattern), map(int, match.groups()), strict=True))
                if self.pattern_for({**const_axes, **sizes}) == pattern:
                    return True
        return False


@dataclass(frozen=True)
class TagNamespace:
    """The rules for the tags ``name:value`` of one namespace.

    Attributes:
        name: the part before the colon.
        description: what its tags mean.
        values: the allowed values; empty if `pattern` decides.
        pattern: regular expression that a whole value must match; empty if `values` decides.
        examples: complete tags.
        required: whether every Definition must carry one.
        repeatable: whether a Definition may carry several.
    """

    name: str
    description: str
    values: tuple[str, ...] = ()
    pattern: str = ""
    examples: tuple[str, ...] = ()
    required: bool = False
    repeatable: bool = True

    def accepts(self, value: str) -> bool:
        """Whether `value` may follow the colon."""
        return value in self.values if self.values else fits(self.pattern, value)


@dataclass(frozen=True)
class Naming:
    """The conventions of schema/naming.json.

    Attributes:
        families: patterns by name, in file order; the first that matches wins.
        abbreviations: abbreviation -> axes that it may stand for.
        namespaces: tag namespaces by name.
        flags: tags without a namespace -> what they mean.
        op_types: op_type -> its common name.
    """

    families: Mapping[str, NamePattern]
    abbreviations: Mapping[str, tuple[str, ...]]
    namespaces: Mapping[str, TagNamespace]
    flags: Mapping[str, str]
    op_types: Mapping[str, str]


def load_naming(root: Path | None = None) -> Naming:
    """The conventions of a dataset root: its ``schema/naming.json`` (cached until the file changes).

    A private root's file adds families and abbreviations to the dataset's. Without a root, those of all roots together.

    Raises:
        NamingError: a file is missing, not JSON, or breaks the conventions (unknown abbreviation, bad pattern), or two
            have a family of one name.
    """
    roots = find_roots() if root is None else [find_root(), Path(root)] if is_private(root) else [Path(root)]
    paths = [one / "schema" / "naming.json" for one in roots]
    paths = [path for path in paths if path == paths[0] or os.path.lexists(path)]
    try:
        return _load(tuple((path, path.stat().st_mtime_ns) for path in paths))
    except OSError as error:
        where = error.filename or paths[0]
        raise NamingError(f"{where}: cannot be read ({error.strerror}); is {roots[0]} a dataset root?") from error


def family_name(definition_like: Any, naming: Naming) -> str | None:
    """Name of the family that a Definition belongs to; None if none matches.

    Args:
        definition_like: a Definition, or its JSON as a mapping; it needs name, op_type and axes.
        naming: from `load_naming`.
    """
    if isinstance(definition_like, Mapping):
        name, op_type = definition_like.get("name"), definition_like.get("op_type")
        const_axes = _const_axes(definition_like.get("axes"))
    else:
        name, op_type, const_axes = definition_like.name, definition_like.op_type, definition_like.const_axes
    if not (isinstance(name, str) and isinstance(op_type, str)):
        return None
    for family in naming.families.values():
        if family.matches(name, op_type, const_axes):
            return family.name
    return None


def ordered(tags: Iterable[str], naming: Naming) -> list[str]:
    """Distinct tags by namespace, in the order of schema/naming.json, then flags.

    Within a namespace, tags follow the order of its listed values; without a list, numbers are sorted by value and
    texts alphabetically.
    """
    namespaces = list(naming.namespaces)

    def key(tag: str) -> tuple[int, int, int, str]:
        namespace, colon, value = tag.partition(":")
        if not colon or namespace not in naming.namespaces:
            return len(namespaces), 0, 0, tag
        values = naming.namespaces[namespace].values
        position = values.index(value) if value in values else len(values)
        return namespaces.index(namespace), position, int(value) if value.isdecimal() else 0, value

    return sorted(set(tags), key=key)


def derive_name(family: NamePattern, const_axes: Mapping[str, int]) -> str:
    """The name that a Definition of `family` with these const axes must have.

    Raises:
        NamingError: the pattern needs a const axis that is not given.
    """
    pattern = family.pattern_for(const_axes)
    missing = [axis for axis in _PLACEHOLDER.findall(pattern) if axis not in const_axes]
    if missing:
        raise NamingError(f"the name {pattern} needs the const axis {missing[0]}")
    return _PLACEHOLDER.sub(lambda match: str(const_axes[match.group(1)]), pattern)


def _const_axes(axes: Any) -> dict[str, int]:
    if not isinstance(axes, Mapping):
        return {}
    return {
        name: axis["value"]
        for name, axis in axes.items()
        if isinstance(axis, Mapping) and axis.get("type") == "const" and type(axis.get("value")) is int
    }


@functools.lru_cache(maxsize=1024)
def _globs(names: tuple[str, ...]) -> re.Pattern[str]:
    """Finds these names and globs."""
    return re.compile("|".join(map(fnmatch.translate, names)))


@functools.lru_cache(maxsize=512)
def _pattern_regex(pattern: str) -> re.Pattern[str]:
    # re.split with one group alternates literal text and axis names.
    parts = _PLACEHOLDER.split(pattern)
    return re.compile("".join(_INTEGER if i % 2 else re.escape(part) for i, part in enumerate(parts)))


@functools.lru_cache(maxsize=32)
def _load(paths: tuple[tuple[Path, int], ...]) -> Naming:
    """The conventions of a file, and what further ones add."""
    (path, _), *further = paths
    try:
        data = load_object(path)
        for path, _ in further:
            data = _with(data, load_object(path))
        return _naming(data)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        if isinstance(error, NamingError):
            raise NamingError(f"{path}: {error}") from None
        if isinstance(error, JsonSourceError):
            raise NamingError(f"{path}: malformed: {error}") from None
        raise NamingError(f"{path}: malformed ({error!r}); schema/naming.schema.json specifies the format") from error


def _with(data: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """The conventions with the families and abbreviations of a private root."""
    if unknown := set(further) - {"$schema", "families", "abbreviations"}:
        raise NamingError(f"a private root adds families and abbreviations only; remove {sorted(unknown)}")
    if taken := set(data["families"]) & set(further.get("families", {})):
        raise NamingError(f"the families {sorted(taken)} are in another root too; rename them")
    abbreviations = dict(data["abbreviations"])
    for name, axes in further.get("abbreviations", {}).items():
        abbreviations[name] = [*abbreviations.get(name, ()), *axes]
    families = {**data["families"], **further.get("families", {})}
    return {**data, "families": families, "abbreviations": abbreviations}


def _naming(data: Mapping[str, Any]) -> Naming:
    abbreviations = {name: tuple(axes) for name, axes in data["abbreviations"].items()}
    families = {
        name: NamePattern(
            name,
            entry["op_type"],
            entry["pattern"],
            tuple(entry.get("where", {}).items()),
            tuple((tuple(one["where"].items()), one["pattern"]) for one in entry.get("exceptions", ())),
            _tags_of(entry),
        )
        for name, entry in data["families"].items()
    }
    namespaces = {
        name: TagNamespace(
            name=name,
            description=entry["description"],
            values=tuple(entry.get("values", ())),
            pattern=entry.get("pattern", ""),
            examples=tuple(entry.get("examples", ())),
            required=entry.get("required", False),
            repeatable=entry.get("repeatable", True),
        )
        for name, entry in data["tags"]["namespaces"].items()
    }
    for namespace in namespaces.values():
        check_pattern(namespace.pattern)
    named: dict[tuple[object, ...], str] = {}
    for family in families.values():
        _check_pattern(family, abbreviations)
        other = named.setdefault((family.pattern, family.where), family.name)
        if other != family.name:
            raise NamingError(
                f"families {other} and {family.name} have the same pattern {family.pattern!r}, so the second "
                "has no names; give one of them another pattern, or a `where`"
            )
    return Naming(families, abbreviations, namespaces, dict(data["tags"]["flags"]), dict(data.get("op_types", {})))


def _tags_of(entry: Mapping[str, Any]) -> tuple[SomeTags, ...]:
    """The tags of a family's entry: those of all its Definitions, and those of some."""
    groups = [{"tags": entry.get("tags", [])}, *entry.get("some_tags", [])]
    return tuple(
        SomeTags(frozenset(strings(one["tags"])), strings(one.get("only", [])), strings(one.get("without", [])))
        for one in groups
    )


def _check_pattern(family: NamePattern, abbreviations: Mapping[str, tuple[str, ...]]) -> None:
    """Checks that each placeholder follows an abbreviation of its axis, so names read the same everywhere."""
    for text in (family.name, family.op_type, family.pattern):
        if not isinstance(text, str) or len(text) > MAX_NAME:
            raise NamingError(f"family {family.name[:40]}: a name is not a string of at most {MAX_NAME} characters")
    # Underscores inside a placeholder belong to the axis's name.
    patterns = (family.pattern, *(pattern for _, pattern in family.exceptions))
    for part in (part for pattern in patterns for part in re.split(r"_(?![^{]*\})", pattern)):
        if "{" not in part and "}" not in part:
            continue
        match = _PART.fullmatch(part)
        if match is None or match["rest"]:
            raise NamingError(f"family {family.name}: the part {part!r} of the pattern is not <abbreviation>{{axis}}")
        if match["axis"] not in abbreviations.get(match["abbreviation"], ()):
            raise NamingError(
                f"family {family.name}: {match['abbreviation']!r} does not stand for {match['axis']} in abbreviations"
            )
