"""Problems that a dry run must report: SGLang catches errors and falls back, so raising is not enough."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tools.runtime_tracing import frames

#: Kinds of findings, each of which fails a run.
UNKNOWN_VALUE = "a value was read from a tensor without data"
UNKNOWN_OUTPUT = "the shape of a kernel's output is not known"
STAND_IN = "a stand-in for a package that is not installed was called"
NOT_WRAPPED = "a kernel library could not be imported, so its calls are not seen"
CAUGHT = "an exception was caught in silence and is on no reviewed list"

#: Found harmless by review, each with a reason: ``modules`` that SGLang can do without, ``places``
#: (``file:function:exception``) that catch, ``stand_ins`` (the start of their path), modules that are ``not_wrapped``,
#: and what is ``assumed``: conditions on weights (``file:function``) that hold for every checkpoint.
_REVIEWED = Path(__file__).with_name("reviewed.json")
REVIEWED: dict[str, dict[str, str]] = json.loads(_REVIEWED.read_text(encoding="utf-8"))

found: Counter[tuple[str, str, str]] = Counter()


class DryRunError(RuntimeError):
    """Something that a dry run cannot know. The message names it, and the place that asked."""


def note(kind: str, what: str, place: str = "") -> None:
    """Remembers a finding; at the end of a run, any finding fails it."""
    found[kind, what, place or here()] += 1


def fail(kind: str, what: str) -> DryRunError:
    """Notes a finding, and returns the error to raise: the note stays if SGLang catches it."""
    note(kind, what)
    return DryRunError(f"{kind}: {what} (at {here()})")


def here() -> str:
    """The innermost two frames of SGLang and the kernel libraries."""
    places = (frames.located(frame) for frame in frames.stack()[:2])
    return " < ".join(f"{place.file}:{place.line}:{place.function}" for place in places)


def is_assumed() -> bool:
    """Whether the innermost frame asks for a condition that every checkpoint meets."""
    places = map(frames.located, frames.stack()[:1])
    return any(f"{place.file}:{place.function}" in REVIEWED["assumed"] for place in places)


def lines() -> list[str]:
    """A line for each finding, in order."""
    return [f"{kind}: {what}, {count} x, at {place}" for (kind, what, place), count in found.items()]
