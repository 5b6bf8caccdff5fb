"""The pairs of Definition and kernel that `pytest -m gpu` has chosen, verified together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flashinfer_trace.cli.group import ended_by_signals
from flashinfer_trace.cli.options import usual_jobs
from flashinfer_trace.cli.processes import run_in_processes
from flashinfer_trace.cli.runs import Settings, run_tasks
from flashinfer_trace.cli.tasks import Task
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Kernel
from flashinfer_trace.harness.verify import Report

Pair = tuple[Definition, Kernel]


class GpuRuns:
    """Verifies pairs when the first report is asked for, and goes on until the one that is asked for has come.

    It does so in processes of their own, which share all GPUs. A worker of pytest-xdist does not know which pairs it
    will get: it verifies one Definition at a time, in its own process, on its own GPU.

    Args:
        pairs: those that are chosen; what the GPU or the libraries lack is left out.
        device: the GPU of this process.
        examples, seed: as `verify_together` takes them.
        evidence: where runs that pass are recorded, if they are.
        jobs: processes; by default, as many as `flashinfer-trace verify --device cuda` takes.
        tell: is told each report as it comes, which may be long before the test that asks for it.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        device: str,
        examples: int,
        seed: int,
        evidence: Path | None,
        jobs: int | None,
        tell: Callable[[Report], None] = lambda report: None,
    ) -> None:
        import torch

        self._tell = tell

        capability = torch.cuda.get_device_capability(device)
        self._tasks = [
            Task(definition, family_of(definition), kernel.label, kernel)
            for definition, kernel in pairs
            if kernel.unavailable(capability) is None and kernel.missing() is None
        ]
        self._one_by_one = "PYTEST_XDIST_WORKER" in os.environ
        self._jobs = jobs or usual_jobs(len({task.definition.name for task in self._tasks}), torch.cuda.device_count())
        where = device if self._one_by_one else "cuda"
        self._settings = Settings(where, examples, seed, None, None, False, evidence and evidence.absolute(), None)
        self._found: dict[tuple[str, str], Report] = {}
        self._coming: Iterator[Report] = iter(())

    def __enter__(self) -> GpuRuns:
        self._signals = ended_by_signals()
        self._signals.__enter__()
        if not self._one_by_one:
            self._coming = self._verified(self._tasks)
        return self

    def __exit__(self, *_: object) -> None:
        getattr(self._coming, "close", lambda: None)()
        self._signals.__exit__(None, None, None)

    def report(self, definition: Definition, kernel: Kernel) -> Report:
        """The result of the pair."""
        pair = definition.name, kernel.label
        if pair not in self._found and self._one_by_one:
            self._coming = self._verified([task for task in self._tasks if task.definition.name == definition.name])
        while pair not in self._found:
            report = next(self._coming, None)
            if report is None:
                pytest.fail(f"{definition.name} was not verified against {kernel.label}")
            self._found[report.definition, report.target] = report
            self._tell(report)
        return self._found[pair]

    def _verified(self, tasks: Sequence[Task]) -> Iterator[Report]:
        if self._one_by_one:
            return run_tasks(tasks, self._settings)
        return run_in_processes(tasks, self._settings, self._jobs)
