"""A Definition around any reference, and what the escapes must not reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.sandbox import worker as worker_module
from flashinfer_trace.sandbox.worker import ReferenceLimits, ReferenceWorker

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ESCAPES: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("escapes.toml").read_text(encoding="utf-8"))[
    "escape"
]

LIMITS = ReferenceLimits(seconds=3.0, memory_bytes=1 << 30, output_bytes=64 << 20)
#: Where a process that imports torch is started: on a busy machine, that takes longer than any honest call.
PATIENT = replace(LIMITS, seconds=60.0)
#: For what never answers.
IMPATIENT = replace(LIMITS, seconds=1.0)


def definition_of(source: str, op_type: str = "rmsnorm", outputs: tuple[str, ...] = ("y",)) -> Definition:
    """A Definition with the input x and the outputs given, all float32 [4]."""
    tensor = {"shape": ["n"], "dtype": "float32", "description": ""}
    return Definition.from_dict(
        {
            "name": "stranger",
            "op_type": op_type,
            "description": "A reference that a stranger sent.",
            "tags": [],
            "axes": {"n": {"type": "const", "value": 4}},
            "constraints": [],
            "inputs": {"x": tensor},
            "outputs": dict.fromkeys(outputs, tensor),
            "reference": f"import torch\n\n{source}",
        }
    )


def x() -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([1.0, -2.0, 3.0, 0.5])}


HONEST = definition_of("def run(x):\n    return 2 * x\n")


@pytest.fixture(scope="session")
def workers() -> Iterator[ReferenceWorker]:
    """One worker for all tests: none of them may disturb the next."""
    with ReferenceWorker(PATIENT) as worker:
        worker.run(HONEST, x(), 0)
        worker.limits = LIMITS
        yield worker


@pytest.fixture
def worker(workers: ReferenceWorker) -> Iterator[ReferenceWorker]:
    """Whatever a test did, an honest reference passes after it."""
    yield workers
    workers.limits = LIMITS
    outputs = workers.run(HONEST, x(), 0)
    assert torch.equal(outputs["y"], 2 * x()["x"])


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches the allow-list off: the worker must contain what it would refuse."""
    monkeypatch.setattr(worker_module, "check_allowed", lambda *_: None)
