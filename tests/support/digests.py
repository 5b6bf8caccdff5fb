"""The sources of the release of the committed digests, if they have been fetched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.extract_definitions import traces

SOURCES = Path(__file__).resolve().parents[2] / traces.SOURCES

needs_digest_sources = pytest.mark.skipif(
    not (SOURCES / "manifest.json").is_file() and "CI" not in os.environ,
    reason=f"no {traces.SOURCES}/; `python -m tools.fetch_sources --release 0.5.8 --dest {traces.SOURCES}` fetches it",
)
