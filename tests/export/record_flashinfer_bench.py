"""Writes what flashinfer-bench says of an exported TraceSet, for docs/export.md, from the traces that it left there.

flashinfer-trace export fib TRACESET NAME...                # a machine without a GPU will do
flashinfer-bench run --local TRACESET                       # 0.1.2, unmodified, on a GPU
python tests/export/record_flashinfer_bench.py TRACESET     # replaces what the file says of the same solutions
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flashinfer_trace.format.files import Lines, laid_out, write_text

RESULTS = Path(__file__).with_name("flashinfer_bench.json")


def summary(directory: Path) -> dict[str, Any]:
    """Where and when it ran, all statuses, and the errors of the rejected."""
    lines = [line for path in sorted(directory.glob("traces/*/*.jsonl")) for line in path.read_text().splitlines()]
    traces = sorted(map(json.loads, lines), key=lambda one: (one["solution"], one["workload"]["uuid"]))
    runs = {one["solution"]: [] for one in traces}
    rejected = []
    for one in traces:
        found, errors = one["evaluation"], one["evaluation"]["correctness"]
        runs[one["solution"]].append(found["status"])
        if found["status"] != "PASSED":
            where = {"solution": one["solution"], "axes": one["workload"]["axes"], "status": found["status"]}
            rejected.append(
                where | {"absolute": errors["max_absolute_error"], "relative": errors["max_relative_error"]}
            )
    (machine,) = {json.dumps(one["evaluation"]["environment"]) for one in traces}
    date = max(one["evaluation"]["timestamp"] for one in traces)[:10]
    rejected.sort(key=lambda one: (one["solution"], str(one["axes"])), reverse=True)
    return {"date": date, "environment": json.loads(machine), "rejected": rejected, "runs": runs}


def merged(recordings: list[dict[str, Any]], latest: dict[str, Any]) -> list[dict[str, Any]]:
    """All recordings, oldest first; of each solution only the latest runs."""
    kept = []
    for one in recordings:
        runs = {name: found for name, found in one["runs"].items() if name not in latest["runs"]}
        rejected = [found for found in one["rejected"] if found["solution"] in runs]
        kept += [{**one, "rejected": rejected, "runs": runs}] if runs else []
    return [*kept, latest]


def layout(path: tuple[str, ...], value: object) -> Lines | None:
    """A line for each part of a recording, and for each solution."""
    spread = len(path) < 2 or path[1:] in (("runs",), ("rejected",))
    return Lines(2 * len(path) + 2, closing=2 * len(path)) if spread else None


def main() -> None:
    recordings = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    write_text(RESULTS, laid_out(merged(recordings, summary(Path(sys.argv[1]))), layout))


if __name__ == "__main__":
    main()
