"""Steps of serving that tests compare: recorded on a GPU, and evaluated without one."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from release import ROOT, index

from tools.kernel_tracing.configuration.requested import shortened
from tools.kernel_tracing.evaluator.serving import Configuration, Serving, Step
from tools.kernel_tracing.rules import serving_steps

RECORDED: dict[str, Any] = json.loads((ROOT / "tests/kernel_tracing/recorded_0_5_11.json").read_text())


@cache
def evaluated(name: str) -> Step:
    """The step of a recorded run, evaluated once per process."""
    run = RECORDED["runs"][name]
    settings = serving_steps.SETTINGS | run["settings"]
    environment = serving_steps.ENVIRONMENT | run["environment"]
    configuration = Configuration(shortened(run["model"]), settings, "sm90", environment, name)
    return Serving(index(), configuration).run()
