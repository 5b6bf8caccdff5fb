"""The pages that `python -m tools.site` builds from the checkout, made once a process."""

from __future__ import annotations

import fcntl
import functools
from pathlib import Path

import pytest

from flashinfer_trace import find_root
from tools.site import __main__ as site
from tools.site.model_pages import ops_of_models


@functools.cache
def pages() -> dict[str, str]:
    """The text of each page, by the path that it would have under the root."""
    return {path.relative_to(find_root()).as_posix(): text for path, text in site.documents(find_root()).items()}


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
