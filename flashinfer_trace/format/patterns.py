"""Regular expressions from data (schemas, naming conventions), matched within a time limit.

An expression like ``(a+)+$`` can take longer than anybody waits. The standard library's `re` cannot be stopped; the
`regex` package can.
"""

from __future__ import annotations

import functools
from typing import Any

#: Longest time for one match, in seconds. Ours take microseconds.
SECONDS = 0.5

#: Longest text of which the outcome is remembered, in characters.
SHORT = 100


class PatternError(ValueError):
    """A text is not a regular expression, or one that takes too long."""


def check_pattern(pattern: str) -> None:
    """Compiles a pattern.

    Raises:
        PatternError: it is not a regular expression.
    """
    _compiled(pattern)


def fits(pattern: str, text: str) -> bool:
    """Whether a whole text matches a pattern; one that once took longer than `SECONDS` fits nothing from then on."""
    return _found(f"(?:{pattern})", text, "fullmatch")


def found_in(pattern: str, text: str) -> bool:
    """Whether a pattern matches somewhere in a text, with ``$`` as in ECMAScript: the end of the text; see `fits`."""
    return _found(f"{pattern[:-1]}\\Z" if pattern.endswith("$") else pattern, text, "search")


_too_slow: set[str] = set()


def _found(pattern: str, text: str, method: str) -> bool:
    if pattern in _too_slow:
        return False
    try:
        return _short_found(pattern, text, method) if len(text) <= SHORT else _searched(pattern, text, method)
    except TimeoutError:
        _too_slow.add(pattern)
        return False


def _searched(pattern: str, text: str, method: str) -> bool:
    return getattr(_compiled(pattern), method)(text, timeout=SECONDS) is not None


#: Names and digests repeat in hundreds of files.
_short_found = functools.lru_cache(maxsize=8192)(_searched)


@functools.lru_cache(maxsize=512)
def _compiled(pattern: str) -> Any:
    import regex  # here, because only what checks names and tags needs it

    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise PatternError(f"{pattern[:80]!r} is not a regular expression: {error}") from None
