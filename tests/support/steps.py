"""Steps of serving that tests compare: recorded on a GPU, and evaluated without one."""

from __future__ import annotations

import ast
import json
from functools import cache
from typing import Any

from release import ROOT, SOURCES

from tools.kernel_tracing.configuration.requested import shortened
from tools.kernel_tracing.evaluator.serving import Configuration, Serving, Step
from tools.kernel_tracing.report.evaluation import index_of
from tools.kernel_tracing.rules import serving_steps

RECORDED: dict[str, Any] = json.loads((ROOT / "tests/kernel_tracing/recorded_0_5_11.json").read_text())


def recorded_frame(number: int) -> str:
    """A recorded frame with the line on which its call begins; the interpreter reports that of a method's name."""
    file, line, function = RECORDED["frames"][number].split(":", 2)
    return f"{file}:{_beginnings(file).get(int(line), line)}:{function}"


@cache
def _beginnings(file: str) -> dict[int, int]:
    """Lines of methods' names -> lines on which the calls begin, for calls where these differ."""
    calls = [node.func for node in ast.walk(ast.parse((SOURCES / file).read_text())) if isinstance(node, ast.Call)]
    return {(one.end_lineno or one.lineno): one.lineno for one in calls if (one.end_lineno or 0) > one.lineno}


@cache
def evaluated(name: str) -> Step:
    """The step of a recorded run, evaluated once per process."""
    run = RECORDED["runs"][name]
    settings = serving_steps.SETTINGS | run["settings"]
    environment = serving_steps.ENVIRONMENT | run["environment"]
    configuration = Configuration(shortened(run["model"]), settings, "sm90", environment, name)
    return Serving(index_of(SOURCES), configuration).run()
