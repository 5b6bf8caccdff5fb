"""One server for all submissions of a test run, and the verdicts that --record-verdicts writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from recorded_verdicts import PROPERTY, entry, run_of, with_memory

from flashinfer_trace.judging.server import Server
from flashinfer_trace.judging.verdict import Verdict


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


@pytest.fixture(scope="session")
def gpu_run(cuda_device: str) -> dict[str, Any]:
    """The GPU, versions and code with which verdicts are recorded."""
    return run_of(cuda_device)


@pytest.fixture
def recorded(gpu_run: dict[str, Any], record_property: Callable[[str, object], None]) -> Callable[..., Verdict]:
    """``recorded(kind, name, judged)`` calls `judged` on a GPU, leaves the verdict in the report of its test, and gives
    it back."""

    def leave(kind: str, name: str, judged: Callable[[], Verdict]) -> Verdict:
        verdict = with_memory(judged)
        record_property(PROPERTY, {"run": gpu_run, "entry": entry(kind, name, verdict)})
        return verdict

    return leave
