"""The sources of the default release, if `python -m tools.fetch_sources` has fetched them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: The release of the committed traces.
VERSION = "0.5.11"


def _version(path: Path) -> str:
    try:
        return str(json.loads((path / "manifest.json").read_text())["sources"]["sglang"]["version"])
    except (OSError, ValueError, KeyError):
        return ""


def _places() -> Iterator[Path]:
    yield ROOT / ".sources"
    yield ROOT / f".sources-{VERSION}"


#: Where the release is: in .sources/, or beside it if that holds another release.
SOURCES = next((place for place in _places() if _version(place) == VERSION), ROOT / ".sources")

#: CI fetches the sources first, so a missing tree is a failure there, not a skip.
_without_sources = pytest.mark.skipif(
    _version(SOURCES) != VERSION and "CI" not in os.environ,
    reason=f"no sources of sglang {VERSION}; `python -m tools.fetch_sources` fetches them (wheels of 550 MB)",
)


def needs_sources(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that reads the release: see the marker `release` in pyproject.toml."""
    marked: Callable[..., None] = pytest.mark.release(_without_sources(test))
    return marked
