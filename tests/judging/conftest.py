"""One server for all submissions of a test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flashinfer_trace.judging.process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started
