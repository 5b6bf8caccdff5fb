"""The pages that `python -m tools.site` builds from the checkout, made once a process."""

from __future__ import annotations

import fcntl
import functools
from pathlib import Path

import pytest

from flashinfer_trace import find_root
from tools.site import __main__ as site
from tools.site.coverage_page import coverage
from tools.site.model_pages import ops_of_models


@functools.cache
def coverage_page() -> str:
    """The text of docs/coverage.md."""
    return coverage(site.gather(find_root()))


@functools.cache
def ops() -> dict[str, str]:
    """The part of each model's page about its ops."""
    return ops_of_models(find_root())


def built_site(factory: pytest.TempPathFactory) -> Path:
    """The whole site, built once for all processes of a test run."""
    base = factory.getbasetemp()
    # With xdist, each process has a folder of its own in the one of the run.
    shared = (base.parent if base.name.startswith("popen-") else base) / "site"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "out" / site.MARK).exists():
            assert site.main(["--out", str(shared / "out")]) == 0
    return shared / "out"
