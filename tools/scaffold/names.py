"""The name pattern of a new family, and the abbreviations that schema/naming.json lacks for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping


def pattern_of(
    family: str, axes: Iterable[str], known: Mapping[str, tuple[str, ...]]
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The pattern `<family>_<abbreviation>{<axis>}...`, and the entries of `abbreviations` that it needs.

    Args:
        family: the name of the family.
        axes: its const axes, in order.
        known: abbreviation -> axes that it may stand for, from schema/naming.json.
    """
    parts = [family]
    missing: dict[str, tuple[str, ...]] = {}
    taken = set[str]()
    for axis in axes:
        abbreviation = next((short for short, long in known.items() if axis in long and short not in taken), None)
        if abbreviation is None:
            abbreviation = next(short for short in _proposals(axis) if short not in taken and short not in known)
            missing[abbreviation] = (axis,)
        taken.add(abbreviation)
        parts.append(f"{abbreviation}{{{axis}}}")
    return "_".join(parts), missing


def _proposals(axis: str) -> Iterator[str]:
    """The axis if it is one letter, the initials of its words, increasingly long prefixes of it, then more letters."""
    words = ["".join(filter(str.isalpha, word)) for word in axis.split("_")]
    letters = "".join(words)
    yield "".join(word[:1] for word in words)
    yield from (letters[:length] for length in range(1, len(letters) + 1))
    yield from (f"{letters}{more}" for more in map("x".__mul__, itertools.count(1)))
