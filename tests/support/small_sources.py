"""Small sources that tests evaluate: what they call and return."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tools.kernel_tracing.evaluator.core import Frame
from tools.kernel_tracing.evaluator.machine import Machine
from tools.kernel_tracing.rules.platforms import Platform
from tools.kernel_tracing.source.index import Index
from tools.kernel_tracing.source.sources import find_sources

PRELUDE = """
import torch, triton
from torch import nn
@triton.jit
def one(x): ...
@triton.jit
def other(x): ...
"""


def evaluate(
    folder: Path, source: str, libraries: dict[str, str] | None = None, gpu: str = "sm90"
) -> tuple[list[str], Any, Machine]:
    """Runs `run()` of a module beside `libraries` (name -> source); returns its kernels, its result and the machine."""
    sources = {"app/__init__.py": "", "app/main.py": PRELUDE + textwrap.dedent(source)}
    for name, text in (libraries or {}).items():
        sources[f"{name}/__init__.py"] = textwrap.dedent(text)
    for name, text in sources.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    machine = Machine(Index(find_sources(folder, ("app", *(libraries or {})))), Platform("cuda"), gpu)
    module = machine.module("app.main")
    machine.start(module)
    machine.stack, machine.phase = [Frame(module, "", module.scope)], "run"
    result = machine.call(machine.lookup("run"), [], {})
    return [event.name for event in machine.events.values()], result, machine
