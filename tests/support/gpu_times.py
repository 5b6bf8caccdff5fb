"""The file of --record-times: how long a run of pairs on a GPU took, for docs/safeguards.md."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from benchmarks.times import read_gpu_times
from flashinfer_trace.format.files import write_json


class TimesRecorder:
    """Adds the run to a file, or replaces an earlier one of as many Definitions on a GPU of the same kind."""

    def __init__(self, path: Path) -> None:
        self.path, self.begin = path, time.monotonic()
        self.definitions: set[str] = set()
        self.counts = {"passed": 0, "failed": 0}

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        pair = item.callspec.params if hasattr(item, "callspec") else {}
        skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
        if call.when == "call" and pair.keys() == {"definition", "kernel"} and not skipped:
            self.counts["passed" if call.excinfo is None else "failed"] += 1
            self.definitions.add(pair["definition"].name)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.definitions:
            return
        import torch

        run = {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "definitions": len(self.definitions),
            **self.counts,
            "seconds": round(time.monotonic() - self.begin, 1),
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
        same = ("gpu", "gpus", "definitions")
        others = [one for one in read_gpu_times(self.path) if any(one[key] != run[key] for key in same)]
        write_json(self.path, {"runs": sorted([*others, run], key=lambda one: (one["gpu"], one["definitions"]))})
