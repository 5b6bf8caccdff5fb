"""The pinned release of sglang in .sources/, if `python -m tools.fetch_sources` has fetched it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tools.kernel_tracing.report.analysis import Analysis, analyse, deep
from tools.kernel_tracing.source.sources import find_sources

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / ".sources"

#: CI fetches the sources first, so a missing tree is a failure there, not a skip.
_without_sources = pytest.mark.skipif(
    not (SOURCES / "manifest.json").is_file() and "CI" not in os.environ,
    reason="no .sources/; `python -m tools.fetch_sources` fetches them (27 MB, from wheels of 550 MB)",
)


def needs_sources(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that reads the pinned release: see the marker `release` in pyproject.toml."""
    marked: Callable[..., None] = pytest.mark.release(_without_sources(test))
    return marked


@cache
def analysis(model: str) -> Analysis:
    """The solved call graph of one model, computed once per process."""
    with deep():
        solved = analyse(find_sources(SOURCES), model)
        gc.freeze()  # it lives as long as the process: the garbage collector need not visit its millions of nodes
    return solved
