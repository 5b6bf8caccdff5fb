"""The pinned release of sglang in .sources/, if `python -m tools.fetch_sources` has fetched it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from tools.kernel_tracing.report.analysis import Analysis, analyse
from tools.kernel_tracing.source.sources import find_sources

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / ".sources"

#: CI fetches the sources first, so a missing tree is a failure there, not a skip.
needs_sources = pytest.mark.skipif(
    not (SOURCES / "manifest.json").is_file() and "CI" not in os.environ,
    reason="no .sources/; `python -m tools.fetch_sources` fetches them (27 MB, from wheels of 550 MB)",
)


@cache
def analysis(model: str) -> Analysis:
    """The solved call graph of one model, computed once per process."""
    return analyse(find_sources(SOURCES), model)
