"""Values of JSON files that nobody has checked by their schema: what a loader asks of each, and where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: Longest value in a message.
MAX_VALUE = 100


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Adds the part of a file that the block reads to the message of each error.

    Raises:
        TypeError: instead of a KeyError, TypeError or AttributeError of the block; it begins with the place.
    """
    try:
        yield
    except KeyError as error:
        raise TypeError(f"{place} has no {_short(error.args[0])}") from error
    except (TypeError, AttributeError) as error:
        raise TypeError(f"{place}: {error}") from error


def members(value: Any, *known: str) -> dict[str, Any]:
    """An object; if members are given, with no others.

    Raises:
        TypeError: it is anything else.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{_short(value)} is not an object")
    if known and (unknown := sorted(value.keys() - set(known))):
        raise TypeError(f"unknown members {_short(unknown)}; it may have {', '.join(known)}")
    return value


def strings(value: Any) -> tuple[str, ...]:
    """A list of strings.

    Raises:
        TypeError: it is anything else.
    """
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{_short(value)} is not a list of strings")
    return tuple(value)


def whole(value: Any, least: int, most: int) -> int:
    """An integer from `least` to `most`.

    Raises:
        TypeError: it is anything else.
    """
    if type(value) is not int or not least <= value <= most:
        raise TypeError(f"{_short(value)} is not an integer from {least} to {most}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def finite(value: Any) -> Any:
    """The value with infinities and NaN as None, which every reader of JSON accepts."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value
