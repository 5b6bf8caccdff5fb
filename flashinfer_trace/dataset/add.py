"""A further Definition of a known family, from the contract and the texts that its Definitions have in common."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset.model_claims import load_model_claims
from flashinfer_trace.dataset.store import definition_paths
from flashinfer_trace.dataset.validation.model_rules import expected_phrases
from flashinfer_trace.format.constraints import Constraint, parse
from flashinfer_trace.format.json_source import load_object
from flashinfer_trace.format.naming import NamePattern, derive_name, family_name, load_naming
from flashinfer_trace.format.reference import render
from flashinfer_trace.format.roots import is_private

#: Namespaces of tags that say which models call a Definition, at which parallel sizes, and whether it was run.
OF_ONE_DEFINITION = ("status", "model", "tp", "ep")
#: Words that concern only one size: models and parallel sizes. Models of models/ are looked for by their names.
_OF_MODELS = re.compile(
    r"\b(?:TP|EP)\b|\bparallelism\b|\bGPUs?\b|flashinfer-bench|\b[Ss]izes? of [A-Z]|\b[Tt]hese are\b"
)
_PARENTHESIS = re.compile(r" \([^()]*\)")
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z0-9])")
#: Whole numbers that stand alone: neither part of a name such as fp8, nor of 1e-6, 128x128 or 10.0.
_WHOLE = re.compile(r"(?<![\w.])\d+(?![\w]|\.\d)")
#: A number up to this one that all texts of a family share is part of the mathematics, also if an axis has this value.
_SMALL = 16


_HEADS = re.compile(r"\b(\d+) (query|key|key-value) heads?\b")
#: ``k == n * 128``, and the same with the sides or the factors exchanged.
_NAME, _FACTOR = r"([A-Za-z]\w*)", r"(\w+)"
_PRODUCTS = [
    (re.compile(form.format(axis=_NAME, product=f"{left} \\* {right}")), *places)
    for form, axis in (("{axis} == {product}", 1), ("{product} == {axis}", 3))
    for left, right, unknown, factor in ((_NAME, _FACTOR, 1, 2), (_FACTOR, _NAME, 2, 1))
    for places in [(axis, unknown + (axis == 1), factor + (axis == 1))]
]


class AddError(ValueError):
    """The Definition cannot be made. The message says why, and what to do."""


def new_definition(root: Path, family: str, values: Mapping[str, int], description: str = "") -> dict[str, Any]:
    """The JSON of a Definition that the dataset lacks, unverified, with its reference.

    Contract and tags are those of the family's Definitions; `flashinfer-trace sync` corrects the tags. A text is taken
    from the Definition with the closest sizes. A sentence of it is left out if it names models or parallel sizes, or
    has a number that does not follow from the sizes in all Definitions that have this sentence. The part before a colon
    in such a sentence is kept if it holds. The other numbers become those of the new sizes.

    Args:
        root: the dataset root, or a private one that is laid over it.
        family: a family of schema/naming.json that has Definitions.
        values: its const axes; those that follow from others by a constraint, or that all Definitions share, can be
            left out.
        description: the Definition's own; made from those of the others if empty.

    Raises:
        AddError: no family has this name; a value is missing, unknown or breaks a constraint; the Definition exists;
            or a text must be written by a person.
        NamingError, ReferenceSourceError, JsonSourceError: a file of the dataset cannot be used.
    """
    pattern, siblings = _pattern(root, family), _siblings(root, family)
    axes = _const_axes(pattern, siblings, values)
    if any(axes.get(axis) != value for axis, value in pattern.where):
        needed = ", ".join(f"{axis}={value}" for axis, value in pattern.where)
        raise AddError(f"{family} has {needed} in all of its Definitions; {_others(root, pattern)}")
    name = derive_name(pattern, axes)
    for path in _paths(root):
        if path.stem == name:
            raise AddError(f"{name} is in the dataset already: {path}")
    closest = sorted(siblings, key=lambda one: _distance(_axes_of(one), axes))
    texts = _Texts(root, closest, axes)
    data = {**closest[0], "name": name, "description": description or texts.at()}
    for section in ("axes", "inputs", "outputs"):
        data[section] = {
            key: {**entry, "description": texts.at(section, key)} if "description" in entry else dict(entry)
            for key, entry in closest[0][section].items()
        }
    for axis, value in axes.items():
        data["axes"][axis]["value"] = value
    kept = [tag for tag in closest[0]["tags"] if tag.partition(":")[0] not in OF_ONE_DEFINITION]
    data["tags"] = ["status:unverified", *kept]
    data["reference"] = render(root, pattern.op_type, family, axes)
    if family_name(data, load_naming(root)) != family:
        raise AddError(f"{name} would be of the family {family_name(data, load_naming(root))}; add it there")
    return data


def _pattern(root: Path, family: str) -> NamePattern:
    families = load_naming(root).families
    if family not in families:
        close = difflib.get_close_matches(family, families, 3)
        hint = f"did you mean {' or '.join(close)}?" if close else "schema/naming.json lists the families"
        raise AddError(f"there is no family {family!r}; {hint}")
    return families[family]


def _siblings(root: Path, family: str) -> list[dict[str, Any]]:
    """The Definitions of a family, as JSON."""
    naming = load_naming(root)
    paths = _paths(root)
    found = [load_object(path) for path in paths if path.parent.name == naming.families[family].op_type]
    found = [one for one in found if family_name(one, naming) == family]
    if not found:
        raise AddError(f"{family} has no Definition to take the contract from; write the first one (CONTRIBUTING.md)")
    return found


def _paths(root: Path) -> list[Path]:
    """The Definitions of a root; of all roots, if it is laid over the dataset."""
    return definition_paths(None if is_private(root) else root)


def _others(root: Path, pattern: NamePattern) -> str:
    """Which families of the same op_type take other values."""
    alike = [one.name for one in load_naming(root).families.values() if one.op_type == pattern.op_type]
    close = difflib.get_close_matches(pattern.name, [name for name in alike if name != pattern.name], 3, 0.7)
    return f"did you mean the family {' or '.join(close)}?" if close else "give these values"


def _axes_of(data: Mapping[str, Any]) -> dict[str, int]:
    return {name: axis["value"] for name, axis in data["axes"].items() if axis["type"] == "const"}


def _const_axes(
    pattern: NamePattern, siblings: Sequence[Mapping[str, Any]], values: Mapping[str, int]
) -> dict[str, int]:
    """All const axes, in declared order: those given, those that follow, and those that all Definitions share."""
    every = [_axes_of(one) for one in siblings]
    names = [*every[0]]
    for axis in values:
        if axis not in names:
            kind = "a variable axis, which each call gives" if axis in siblings[0]["axes"] else "not an axis"
            raise AddError(f"{axis} is {kind}; the const axes of {pattern.name} are {', '.join(names)}")
    constraints = [parse(text) for text in siblings[0].get("constraints", ())]
    axes = {**dict(pattern.where), **values}
    _derive(axes, names, constraints)
    # An axis that is the same at several values of each axis that changes does not depend on it.
    varied = all(value in (found := {one[axis] for one in every}) or len(found) > 1 for axis, value in axes.items())
    for axis in names if varied else ():
        if axis not in axes and axis not in pattern.axes and len(shared := {one[axis] for one in every}) == 1:
            axes[axis] = shared.pop()
            _derive(axes, names, constraints)
    if missing := [axis for axis in names if axis not in axes]:
        example = " ".join(f"{axis}={every[0][axis]}" for axis in missing)
        raise AddError(f"{pattern.name} also needs {', '.join(missing)}; give, for example, {example}")
    for constraint in constraints:
        if constraint.names <= axes.keys() and not constraint.evaluate(axes):
            raise AddError(f"{constraint.explain(axes)}; choose other values, or give more of the axes")
    return {axis: axes[axis] for axis in names}


def _derive(axes: dict[str, int], names: Sequence[str], constraints: Iterable[Constraint]) -> None:
    """Adds the axes that equations determine: `a == expression`, and `expression == a * 128` if that divides."""
    known = -1
    while known != len(axes):
        known = len(axes)
        for constraint in constraints:
            found = constraint.solve(axes) or _quotient(constraint.expression, axes)
            axes.update({name: value for name, value in found.items() if name in names})


def _quotient(expression: str, axes: Mapping[str, int]) -> dict[str, int]:
    """The unknown factor of a product, such as `n` of ``k == n * 128``; none if there is none, or it is not whole."""
    for pattern, axis, unknown, factor in _PRODUCTS:
        if (match := pattern.fullmatch(expression)) and match[axis] in axes and match[unknown] not in axes:
            by = int(match[factor]) if match[factor].isdigit() else axes.get(match[factor], 0)
            if by and axes[match[axis]] % by == 0:
                return {match[unknown]: axes[match[axis]] // by}
    return {}


def _distance(one: Mapping[str, int], other: Mapping[str, int]) -> float:
    """How different sizes are: doubling an axis counts as much as halving it."""
    return sum(abs(math.log((one[axis] + 1) / (other[axis] + 1))) for axis in other)


class _Texts:
    """The texts of a family at new sizes."""

    def __init__(self, root: Path, siblings: Sequence[Mapping[str, Any]], axes: Mapping[str, int]) -> None:
        """Takes the Definitions of the family, those whose texts are preferred first, and the new const axes."""
        claims = load_model_claims(root)
        tagged = {tag.partition(":")[2] for one in siblings for tag in one["tags"] if tag.startswith("model:")}
        names = [re.escape(name).replace(r"\-", "[- ]") for name in (*tagged, *(claims.titles if claims else ()))]
        self._models = re.compile(rf"(?i)(?<![\w-])(?:{'|'.join(names)})" if names else r"(?!)")
        self._siblings, self._axes = siblings, axes

    def at(self, *place: str) -> str:
        """The text of a place, such as ``("inputs", "x")``; none for the Definition's own."""
        texts = [_text(one, place) for one in self._siblings]
        if not place:
            texts = [_PARENTHESIS.sub(lambda match: "" if self._names(match[0]) else match[0], one) for one in texts]
        members = [(text, _axes_of(one)) for text, one in zip(texts, self._siblings, strict=True)]
        for text in texts:
            held = [self._held(one, members, general=bool(place)) for one in _SENTENCE_END.split(text)]
            if held[0]:
                return " ".join(filter(None, held))
        where = f"the description of {' '.join(place)}" if place else "the description"
        fix = "write one: --description TEXT" if not place else "copy a Definition of the family, and edit that"
        raise AddError(f"{where} cannot be taken from other Definitions, because it is true only of their sizes; {fix}")

    def _names(self, text: str) -> bool:
        return bool(_OF_MODELS.search(text) or self._models.search(text))

    def _held(self, sentence: str, members: Sequence[tuple[str, Mapping[str, int]]], general: bool) -> str:
        """A sentence at the new sizes, or what precedes its first colon; "" if neither holds for them.

        Texts of axes, inputs and outputs are `general`: if they name parallel sizes, they mean those of any model.
        """
        part = sentence.partition(": ")[0]
        for text in (sentence, f"{part}." if part != sentence else ""):
            named = self._models.search(text) if general else self._names(text)
            if text and not named and (held := self._rendered(text, members)):
                return held
        return ""

    def _rendered(self, text: str, members: Sequence[tuple[str, Mapping[str, int]]]) -> str:
        """A text with the numbers of the new sizes; "" if one of its numbers has no explanation in all members."""
        found = [(numbers, axes) for other, axes in members for numbers in _same_wording(text, other)]
        replaced = []
        for place, written in enumerate(_WHOLE.findall(text)):
            axes = [axis for axis in self._axes if all(int(numbers[place]) == sizes[axis] for numbers, sizes in found)]
            constant = all(numbers[place] == written for numbers, _ in found)
            if constant and (not axes or int(written) <= _SMALL):
                replaced.append(written)
            elif len({self._axes[axis] for axis in axes}) == 1:
                replaced.append(str(self._axes[axes[0]]))
            else:
                return ""
        new = iter(replaced)
        text = _WHOLE.sub(lambda _: next(new), text)
        for phrase, _, value in expected_phrases(self._axes):
            text = phrase.sub(partial(_with_number, number=value), text)
        return _HEADS.sub(lambda match: f"{match[1]} {match[2]} head{'s' * (match[1] != '1')}", text)


def _with_number(phrase: re.Match[str], number: int) -> str:
    start, end = (position - phrase.start() for position in phrase.span(1))
    return f"{phrase[0][:start]}{number}{phrase[0][end:]}"


def _text(data: Mapping[str, Any], place: Sequence[str]) -> str:
    for key in place:
        data = data[key]
    return str(data["description"]).replace(" in these models", " in models")


def _same_wording(text: str, other: str) -> Iterator[list[str]]:
    """The numbers of each sentence of another text, or of what precedes its colon, that differs in numbers alone."""
    wording = _WHOLE.sub("#", text)
    for sentence in _SENTENCE_END.split(other):
        for one in (sentence, f"{sentence.partition(': ')[0]}."):
            if _WHOLE.sub("#", one) == wording:
                yield _WHOLE.findall(one)
                break
