"""Finds Definitions by the words of the field, and tells apart those of alike names. Imports no torch."""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashinfer_trace.dataset.model_claims import ModelClaims, load_model_claims
from flashinfer_trace.dataset.store import DatasetError, closest
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.naming import Naming, family_name

#: Namespaces of tags whose values are words of their own.
NAMESPACES = ("model", "stage", "quantization", "routing", "status")
#: Namespaces of the sizes by which a model is divided among GPUs.
SIZES = ("tp", "ep")
_CONSTANT = re.compile(r"^([A-Z][A-Z0-9_]*) = (-?[0-9][0-9eE.+-]*|True|False|None)$", re.MULTILINE)
_WORD = re.compile(r"[a-z0-9][a-z0-9.-]*[a-z0-9]")

Predicate = Callable[[Definition], bool]


def constants(definition: Definition) -> dict[str, str]:
    """Axes and other constants with their values, by lower-case name: ``{"hidden_size": "4096", "eps": "1e-5"}``."""
    found = {name.lower(): value for name, value in _CONSTANT.findall(definition.reference)}
    return {**found, **{axis.lower(): str(value) for axis, value in definition.const_axes.items()}}


def distinguishing(definitions: Iterable[Definition]) -> dict[str, dict[str, str]]:
    """The constants other than axes in which Definitions of the same axes, inputs and outputs differ, by Definition."""
    alike: dict[tuple[object, ...], list[Definition]] = defaultdict(list)
    for one in definitions:
        alike[one.op_type, frozenset(one.axes), tuple(one.inputs), tuple(one.outputs)].append(one)
    found: dict[str, dict[str, str]] = {}
    for group in alike.values():
        axes = {axis.lower() for axis in group[0].axes}
        values = {one.name: set(constants(one).items()) for one in group}
        shared = set.intersection(*values.values())
        for name, each in values.items():
            found[name] = {key: value for key, value in sorted(each - shared) if key not in axes}
    return found


def check_filters(every: Sequence[Definition], naming: Naming, op_type: str | None, tags: Sequence[str]) -> None:
    """Refuses an op_type or a tag that is neither in use nor listed in schema/naming.json.

    Raises:
        DatasetError: the message suggests the closest ones.
    """
    op_types = {one.op_type for one in every} | {family.op_type for family in naming.families.values()}
    if op_type is not None and op_type not in op_types:
        hint = closest(op_type, sorted(op_types)) or f"the op_types are {', '.join(sorted(op_types))}"
        raise DatasetError(f"no op_type {op_type!r}; {hint}")
    known = {tag for one in every for tag in one.tags} | set(naming.flags)
    known |= {f"{space.name}:{value}" for space in naming.namespaces.values() for value in space.values}
    for tag in tags:
        if tag not in known:
            siblings = sorted(one for one in known if one.startswith(f"{tag.split(':', 1)[0]}:"))
            spaces = ", ".join(f"{name}:" for name in naming.namespaces)
            hint = closest(tag, siblings) or closest(tag, sorted(known)) or f"tags begin with {spaces}"
            raise DatasetError(f"no Definition has the tag {tag!r}; {hint}")


@dataclass(frozen=True)
class _Condition:
    """One word of a query, or several that only mean something together, and what it asks of a Definition."""

    text: str
    holds: Predicate


class Catalog:
    """Every Definition, by the words that find it."""

    def __init__(self, definitions: Iterable[Definition], naming: Naming) -> None:
        self.definitions = tuple(definitions)
        self._naming = naming
        self._families = {one.name: family_name(one, naming) or "" for one in self.definitions}
        #: Whole names and values of tags, and what else finds a Definition: parts of names, words of descriptions.
        self._terms: defaultdict[str, set[str]] = defaultdict(set)
        self._parts: defaultdict[str, set[str]] = defaultdict(set)
        for one in self.definitions:
            names = {one.op_type, one.name, self._families[one.name]}
            tags = {value for namespace in NAMESPACES for value in one.tag_values(namespace)}
            for word in (names | tags | {tag for tag in one.tags if ":" not in tag}) - {""}:
                self._terms[word.casefold()].add(one.name)
            prose = _WORD.findall(one.description.split(". ")[0].casefold())
            spaces = {namespace for namespace in NAMESPACES if one.tag_values(namespace)} & {"quantization", "routing"}
            prose += _WORD.findall(naming.op_types.get(one.op_type, "").casefold())
            for word in {*prose, *spaces, *(part for name in names for part in name.split("_"))}:
                self._parts[word].add(one.name)
        self._models = {model for one in self.definitions for model in one.tag_values("model")}

    def family(self, definition: Definition) -> str:
        """Name of its family; empty if none has it."""
        return self._families[definition.name]

    def find(self, words: Sequence[str]) -> list[Definition]:
        """The Definitions that every word fits, in their order.

        A word is an op_type, a family, a Definition (or a glob), a part of these names, a model (or the beginning of
        several: ``qwen3``), a stage, a quantization, or a word of the first sentence of a description. ``key=value``
        fits an axis, another constant, tp, ep, or a namespace of tags. Models and sizes belong together:
        ``llama-3.1-70b tp=8`` finds what that model calls at that size, and what it calls at every size.

        Raises:
            DatasetError: a word fits nothing (the message suggests some that do), or no Definition fits all of them
                (it says how many would without one of them).
        """
        conditions = self._conditions(words)
        found = [one for one in self.definitions if all(condition.holds(one) for condition in conditions)]
        if found:
            return found
        hints = []
        for left_out in conditions:
            others = [condition for condition in conditions if condition is not left_out]
            count = sum(all(condition.holds(one) for condition in others) for one in self.definitions)
            if others and count:
                hints.append(f"{count} without {left_out.text}")
        raise DatasetError(f"no Definition fits {' '.join(words)}; {', '.join(hints) or 'leave out a word'}")

    def models(self, definition: Definition) -> dict[str, list[str]]:
        """The models that call a Definition, each with the sizes (``tp:8``) that it needs; none for all sizes."""
        return {model: sorted(self._sizes(definition, model)) for model in definition.tag_values("model")}

    def _sizes(self, definition: Definition, model: str) -> Collection[str]:
        claims = _claims(definition.root)
        if claims is not None:
            return claims.sizes(definition.name, model)
        return [tag for tag in definition.tags if tag.partition(":")[0] in SIZES]

    def _conditions(self, words: Sequence[str]) -> list[_Condition]:
        sizes: dict[str, str] = {}
        models: list[tuple[str, set[str]]] = []
        conditions = []
        for word in words:
            key, separator, value = word.partition("=")
            if key == "model" and separator:
                models.append((word, self._known(value, self._models, "model")))
            elif key in SIZES and separator:
                if sizes.setdefault(key, value) != value:
                    raise DatasetError(f"{key}={sizes[key]} and {word}: a search takes one size of {key}")
            elif separator:
                conditions.append(_Condition(word, self._pair(key, value)))
            elif chosen := _begin_with(word.casefold(), self._models):
                models.append((word, chosen))
            else:
                conditions.append(_Condition(word, functools.partial(_is_in, self._fitting(word))))
        wanted = {f"{key}:{value}" for key, value in sizes.items()}
        text = " ".join(f"{key}={value}" for key, value in sizes.items())
        if not wanted:
            called = [_Condition(word, functools.partial(self._called, chosen, wanted)) for word, chosen in models]
            return [*conditions, *called]
        known = {tag.replace(":", "=") for one in self.definitions for tag in one.tags}
        for size in text.split():
            self._known(size, {one for one in known if one.startswith(size[:3])}, "size")
        together = " ".join([*(word for word, _ in models), text])
        each = [functools.partial(self._called, chosen, wanted) for _, chosen in models]
        each = each or [functools.partial(self._called, self._models, wanted)]
        return [*conditions, *(_Condition(together, holds) for holds in each)]

    def _called(self, models: Collection[str], wanted: set[str], definition: Definition) -> bool:
        """Whether one of the models calls the Definition at all of these sizes."""
        for model in definition.tag_values("model"):
            if model in models:
                sizes = self._sizes(definition, model)
                if not sizes or wanted <= set(sizes):
                    return True
        return False

    def _known(self, value: str, known: Collection[str], what: str) -> set[str]:
        found = _begin_with(value.casefold(), known) if what == "model" else {value} & set(known)
        if not found:
            hint = closest(value, sorted(known)) or f"there are {', '.join(sorted(known)[:8])} and more"
            raise DatasetError(f"no Definition has the {what} {value!r}; {hint}")
        return found

    def _pair(self, key: str, value: str) -> Predicate:
        """The condition of ``key=value``: op_type, family, name, a namespace of tags, an axis (or its abbreviation)."""
        if key in ("op_type", "family", "name"):
            of = self.family if key == "family" else operator.attrgetter(key)
            values: set[str] = {of(one) for one in self.definitions}
            if not fnmatch.filter(values, value):
                hint = closest(value, values) or f"there are {', '.join(sorted(values)[:8])} and more"
                raise DatasetError(f"no Definition has the {key} {value!r}; {hint}")
            return lambda one: fnmatch.fnmatchcase(of(one), value)
        if key in self._naming.namespaces:
            self._known(f"{key}:{value}", {tag for one in self.definitions for tag in one.tags}, "tag")
            return lambda one: f"{key}:{value}" in one.tags
        names = {key.lower(), *map(str.lower, self._naming.abbreviations.get(key, ()))}
        facts = {one.name: constants(one) for one in self.definitions}
        there = {each[name] for each in facts.values() for name in names if name in each}
        if not there:
            known = {name for each in facts.values() for name in each}
            raise DatasetError(
                f"no Definition has the constant {key!r}; "
                f"{closest(key, known) or 'give an axis, a constant, tp, ep, model or a namespace of tags'}"
            )
        alike = {each for each in there if _number(each) == _number(value)}
        if not alike:
            some = sorted(there, key=lambda each: (len(each), each))
            raise DatasetError(f"no Definition has {key}={value}; there are {', '.join(some[:12])}")
        return lambda one: any(facts[one.name].get(name) in alike for name in names)

    def _fitting(self, word: str) -> set[str]:
        """Names of the Definitions that a free word finds."""
        text = word.casefold()
        if any(sign in word for sign in "*?["):
            names = set(fnmatch.filter([one.name for one in self.definitions], word))
        else:
            families = {name for name, family in self._families.items() if len(text) > 2 and text in family}
            names = self._terms.get(text) or self._parts.get(text, set()) | families
        if not names:
            known = {*self._terms, *self._parts}
            raise DatasetError(f"no Definition has the word {word!r}; {closest(text, known) or 'give another word'}")
        return names


@functools.lru_cache(maxsize=64)
def _claims(root: Path | None) -> ModelClaims | None:
    return load_model_claims(root) if root is not None else None


def _is_in(names: Collection[str], definition: Definition) -> bool:
    return definition.name in names


def _begin_with(text: str, models: Collection[str]) -> set[str]:
    """The model of this name, or those whose names begin with it: ``qwen3`` is qwen3-8b and others."""
    return {text} & set(models) or {one for one in models if one.startswith((f"{text}-", f"{text}."))}


def _number(text: str) -> float | str:
    """A value to compare: 1e-05 is 1e-5."""
    try:
        return float(text)
    except ValueError:
        return text.casefold()
