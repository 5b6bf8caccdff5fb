"""Writes what flashinfer-bench's validator says of an exported TraceSet, for docs/export.md. No GPU is needed.

flashinfer-trace export fib TRACESET NAME...                # such as one Definition of each family
git clone https://github.com/flashinfer-ai/flashinfer-bench CLONE        # release 0.1.2 has no validator yet
python tests/export/record_flashinfer_bench_validator.py CLONE TRACESET

Its package imports FlashInfer for a function that times kernels, which the validator does not call without a GPU. Where
FlashInfer is not installed, an empty function replaces that one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("flashinfer_bench_validator.json")


def validated(clone: Path, trace_set: Path) -> dict[str, Any]:
    """The validator's report: ``config`` and ``definitions``."""
    sys.path.insert(0, str(clone))
    if importlib.util.find_spec("flashinfer") is None:
        testing = types.ModuleType("flashinfer.testing")
        testing.bench_gpu_time_with_cupti = lambda *arguments, **options: None
        sys.modules |= {"flashinfer": types.ModuleType("flashinfer"), "flashinfer.testing": testing}
    from flashinfer_bench.data.validate import validate_dataset

    reports = trace_set.parent / f"{trace_set.name}_validated"
    validate_dataset(dataset=str(trace_set), disable_gpu=True, output_folder=str(reports), outputs=["json"])
    return json.loads(max(reports.glob("*.json")).read_text())


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Which checks ran on how many Definitions, how many errors there are, and how often each warning."""
    messages = [
        (one["level"], one["message"])
        for found in report["definitions"].values()
        for check in found.values()
        if isinstance(check, dict)
        for one in check["messages"]
    ]
    levels = Counter(level for level, _ in messages)
    unknown = levels.keys() - {"info", "warning", "error"}
    if unknown:
        raise SystemExit(f"messages of levels that are not known: {sorted(unknown)}")
    return {
        "checks": report["config"]["checks"],
        "definitions": len(report["definitions"]),
        "errors": levels["error"],
        "warnings": dict(Counter(message for level, message in messages if level == "warning")),
    }


def main() -> None:
    clone, trace_set = map(Path, sys.argv[1:])
    log = ["git", "-C", str(clone), "log", "-1", "--format=%H %cs"]
    commit, date = subprocess.run(log, capture_output=True, text=True, check=True).stdout.split()
    found = summary(validated(clone.resolve(), trace_set.resolve()))
    today = datetime.now(timezone.utc).date().isoformat()
    RESULTS.write_text(json.dumps({"date": today, "commit": commit, "of": date, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
