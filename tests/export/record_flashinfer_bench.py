"""Writes what flashinfer-bench says of an exported TraceSet, for docs/export.md, from the traces that it left there.

flashinfer-trace export fib TRACESET NAME...                # a machine without a GPU will do
flashinfer-bench run --local TRACESET                       # 0.1.2, unmodified, on a GPU
python tests/export/record_flashinfer_bench.py TRACESET
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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


def main() -> None:
    document = summary(Path(sys.argv[1]))
    runs = ",\n".join(f"    {json.dumps(name)}: {json.dumps(found)}" for name, found in document.pop("runs").items())
    head = json.dumps(document, indent=2).removesuffix("\n}")
    RESULTS.write_text(f'{head},\n  "runs": {{\n{runs}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
