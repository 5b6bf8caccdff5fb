"""Conditions as text: their parts, and how these are joined, split again and summarised over a chain."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

MAX_LENGTH = 300
# Rank of a part in a condition: the server's configuration; the layer, path, mode or GPU; other tests in the sources.
CONFIGURATION, KIND, TEST = range(3)
_SPECULATIVE = "speculative decoding"
_MEMBER = re.compile(r"[A-Z]\w*\.([A-Z]\w*( or \w+)*|\w+\(\))")
_SETTING = re.compile(r"[\w ]+=[^\s()=]+( or [^\s()=]+)*|" + _SPECULATIVE)
_NAMED_KIND = re.compile(r"[\w-]+ layer|GPU: [\w ]+")


@dataclass(frozen=True)
class Part:
    """One part of a condition.

    Attributes:
        text: its text in the trace.
        rank: CONFIGURATION, KIND or TEST.
        dimension: what is chosen: `quantization`, `AttnForwardMethod`, `GPU`; "" for other tests in the sources.
        values: what it must be or, if negated, must not be.
        subject: the expression that is tested; two tests of the same subject and dimension limit each other.
        negated: whether it must be none of the values.
    """

    text: str
    rank: int = TEST
    dimension: str = ""
    values: tuple[str, ...] = ()
    subject: str = ""
    negated: bool = False


# Any speculative algorithm.
SPECULATIVE = Part(_SPECULATIVE, CONFIGURATION, "speculative", (_SPECULATIVE,))


def setting(dimension: str, values: Iterable[str], subject: str = "", negated: bool = False) -> Part:
    """`quantization=fp8 or int8`."""
    ordered = tuple(dict.fromkeys(values))
    return Part(
        _negate(f"{dimension}={' or '.join(ordered)}", negated, len(ordered)),
        CONFIGURATION,
        dimension,
        ordered,
        subject,
        negated,
    )


def member(enum: str, values: Iterable[str], subject: str = "", negated: bool = False, predicate: str = "") -> Part:
    """`ForwardMode.DECODE or IDLE`; with a predicate, `ForwardMode.is_extend()`."""
    ordered = tuple(dict.fromkeys(values))
    if predicate:
        return Part(_negate(f"{enum}.{predicate}()", negated, 1), KIND, enum, ordered, subject, negated)
    text = _negate(f"{enum}.{' or '.join(ordered)}", negated, len(ordered))
    return Part(text, KIND, enum, ordered, subject, negated)


def named(dimension: str, value: str, text: str, negated: bool = False) -> Part:
    """`MoE layer`, `GPU: sm90`."""
    return Part(_negate(text, negated, 1), KIND, dimension, (value,), value, negated)


def _negate(text: str, negated: bool, count: int) -> str:
    if not negated:
        return text
    return f"not ({text})" if count > 1 else f"not {text}"


def join(parts: Iterable[Part]) -> str:
    """The condition of one hop. If it is too long, whole parts are dropped from the end and replaced by `...`."""
    ordered = sorted(merge(parts), key=lambda part: part.rank)
    return _bounded([part.text for part in ordered], MAX_LENGTH)


def merge(parts: Iterable[Part]) -> list[Part]:
    """The parts without repetitions and without those that others imply: E.A implies that it is not E.B."""
    found = list({part.text: part for part in parts}.values())
    chosen = {(part.dimension, part.subject) for part in found if part.dimension and not part.negated}
    kept: list[Part] = []
    refused: dict[tuple[str, str], int] = {}
    for part in found:
        key = (part.dimension, part.subject)
        if part.negated and part.dimension:
            if key in chosen:
                continue
            if key in refused and not part.text.endswith("()"):
                earlier = kept[refused[key]]
                values = (*earlier.values, *part.values)
                make = setting if part.rank == CONFIGURATION else member
                kept[refused[key]] = make(part.dimension, values, part.subject, negated=True)
                continue
            if part.subject and not part.text.endswith("()") and part.dimension != "GPU":
                refused[key] = len(kept)
        kept.append(part)
    return kept


def _bounded(texts: list[str], limit: int) -> str:
    kept: list[str] = []
    for text in texts:
        if kept and len(" and ".join([*kept, text])) > limit:
            return " and ".join([*kept, "..."])
        kept.append(text)
    return " and ".join(kept)


def split_condition(text: str) -> list[str]:
    """The parts of a condition that must all hold: split at `;`, `,` and `and`, never inside brackets or quotes.

    A part that was cut because of its length is omitted, because its meaning is unknown.
    """
    return [_unwrap(part) for part in _split(text) if "..." not in part]


def _split(text: str) -> list[str]:
    parts, depth, quote, start, position = [], 0, "", 0, 0
    while position < len(text):
        character = text[position]
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        elif depth == 0 and (match := re.match(r"[;,]\s+| and ", text[position:])):
            parts.append(text[start:position])
            position = start = position + len(match[0])
            continue
        position += 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _unwrap(part: str) -> str:
    """The part without enclosing brackets."""
    inner = part[1:-1]
    whole = part.startswith("(") and part.endswith(")") and not re.search(r"[()]", inner)
    return inner.strip() if whole and inner.strip() else part


def summarise(conditions: Iterable[str], limit: int = MAX_LENGTH) -> str:
    """The condition of a whole chain, from the conditions of its frames, the kernel call's first.

    Args:
        conditions: the conditions of the frames, as in a trace.
        limit: the most characters; if it is exceeded, whole parts are dropped and replaced by `...`.

    Returns: the parts that must all hold, without repetitions: first the server's configuration, then layer, path, mode
    and GPU, then other tests in the sources from the model to the kernel; "" if there are none.
    """
    parts = dict.fromkeys(part for text in reversed(list(conditions)) for part in _split(text) if part != "...")
    read = {part: _read(part) for part in parts}
    kept = [part for part in parts if not any(_implies(read[other], read[part]) for other in parts if other != part)]
    return _bounded(sorted(kept, key=rank), limit)


def either(alternatives: Iterable[Iterable[Part]], limit: int = MAX_LENGTH, count: int = 3) -> str:
    """Any of several conditions: first what they share, then how they differ.

    Args:
        alternatives: the parts of each condition.
        limit: the most characters of each condition.
        count: how many alternatives are written out; the number of the others follows.

    Returns: `quantization=fp8 and (GPU: sm100; or not enable_x)`; "" if one of them is always true.
    """
    found = [{part.text: part for part in merge(parts)} for parts in alternatives]
    shared = [part for part in found[0].values() if all(part.text in other for other in found)] if found else []
    rest = {summarise([part.text for part in parts.values() if part not in shared], limit) for parts in found}
    common = summarise([part.text for part in shared], limit)
    if "" in rest or not rest:
        return common
    ordered = sorted(rest, key=lambda text: (len(text), text))
    more = [f"{len(ordered) - count} more"] if len(ordered) > count else []
    choices = "; or ".join(ordered[:count] + more)
    return f"{common} and ({choices})" if common and len(ordered) > 1 else " and ".join(filter(None, [common, choices]))


def contradictions(conditions: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of parts of a chain's conditions that cannot both hold: different or excluded values of one setting.

    They occur because hops may be over-approximated: the chain is in the trace, but no configuration takes it.
    """
    parts = list(dict.fromkeys(part for text in conditions for part in _split(text)))
    read = {part: _read(part) for part in parts if rank(part) == CONFIGURATION}
    return [(one, other) for one, other in itertools.combinations(read, 2) if _excludes(read[one], read[other])]


# The dimension of a choice, its values, and whether they are excluded.
_Read: TypeAlias = "tuple[str, frozenset[str], bool] | None"


def _read(part: str) -> _Read:
    """The choice in a part; None for other tests in the sources and for parts without values."""
    plain = _unwrap(part.removeprefix("not ").strip())
    separator = "=" if rank(plain) == CONFIGURATION else "."
    dimension, found, values = plain.partition(separator)
    if rank(plain) == TEST or not found or values.endswith("()"):
        return None
    return dimension, frozenset(values.split(" or ")), part.startswith("not ")


def _implies(one: _Read, other: _Read) -> bool:
    """Whether one choice implies another: `a=x` implies `a=x or y`, and `not a=z`."""
    if one is None or other is None or one[0] != other[0] or one[2]:
        return False
    return not one[1] & other[1] if other[2] else one[1] < other[1]


def _excludes(one: _Read, other: _Read) -> bool:
    if one is None or other is None or one[0] != other[0] or (one[2] and other[2]):
        return False
    if one[2] or other[2]:
        refused, chosen = (one, other) if one[2] else (other, one)
        return chosen[1] <= refused[1]
    return not one[1] & other[1]


def rank(part: str) -> int:
    """The rank of one part of a condition: CONFIGURATION, KIND or TEST."""
    plain = part.removeprefix("not ").strip()
    plain = _unwrap(plain)
    if _SETTING.fullmatch(plain):
        return CONFIGURATION
    return KIND if _MEMBER.fullmatch(plain) or _NAMED_KIND.fullmatch(plain) else TEST
