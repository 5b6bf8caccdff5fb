"""Steps of serving that tests compare: recorded on a GPU, and evaluated without one."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tools.kernel_tracing.configuration.requested import shortened
from tools.kernel_tracing.evaluator.serving import Configuration, Serving, Step
from tools.kernel_tracing.rules import serving_steps
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import find_sources

ROOT = Path(__file__).resolve().parents[2]
#: The release that was recorded; another place than .sources/, as that holds the default release.
SOURCES = Path(os.environ.get("SGLANG_0_5_11_SOURCES", ROOT / ".sources-0.5.11"))
RECORDED: dict[str, Any] = json.loads((ROOT / "tests/kernel_tracing/recorded_0_5_11.json").read_text())

needs_recorded_release = pytest.mark.skipif(
    not (SOURCES / "manifest.json").is_file(),
    reason=f"no {SOURCES}: fetch it with `python -m tools.fetch_sources --release 0.5.11 --dest {SOURCES}`",
)


@cache
def index() -> Index:
    """The sources of the recorded release, parsed once per process."""
    return Index(find_sources(SOURCES))


@cache
def evaluated(name: str) -> Step:
    """The step of a recorded run, evaluated once per process."""
    run = RECORDED["runs"][name]
    settings = serving_steps.SETTINGS | run["settings"]
    environment = serving_steps.ENVIRONMENT | run["environment"]
    configuration = Configuration(shortened(run["model"]), settings, "sm90", environment, name)
    return Serving(index(), configuration).run()
