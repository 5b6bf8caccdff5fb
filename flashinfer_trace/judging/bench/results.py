"""Recorded times of real kernels: results/<gpu>/<op_type>/<name>.jsonl, with one line per kernel, workload and run."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import UnreadableFile, read_text, write_text
from flashinfer_trace.format.json_source import parse
from flashinfer_trace.judging.bench.environment import Clocks
from flashinfer_trace.judging.bench.report import Measured, Report, Timetable
from flashinfer_trace.judging.traffic import path_of
from flashinfer_trace.kernels import current_label

#: Largest file of times that is read. A run adds a few KiB.
MAX_BYTES = 64 * 1024 * 1024


class ResultsError(ValueError):
    """A file in results/ that cannot be read. The message names the file, the line and the fix."""


def append(report: Report, definition: Definition, root: Path) -> list[Path]:
    """Appends the times of real kernels that were timed with a cold cache and without a graph below the directory
    `root`.

    Returns:
        The file; empty without any such time.
    """
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    lines = [
        json.dumps(_record(report, definition, each, one, when), separators=(",", ":"))
        for each in report.timetables
        for one in each.kernels
        if one.library and one.summary is not None and not (report.warm or report.graph)
    ]
    if not lines:
        return []
    path = root / directory(report.environment.gpu) / definition.op_type / f"{definition.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    _append("".join(f"{line}\n" for line in lines), path)
    return [path]


def directory(gpu: str) -> str:
    """The name of a GPU as that of a directory: ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def timed(root: Path, gpu: str, definitions: Iterable[Definition]) -> set[str]:
    """Names of the Definitions that have a time of a real kernel on this GPU, for the reference that they have now."""
    references = {one.name: one.reference_sha256 for one in definitions}
    return {
        one["definition"]
        for one in read(root)
        if one["gpu"] == directory(gpu) and references.get(one["definition"]) == one["reference_sha256"]
    }


def of_today(record: Mapping[str, Any], definition: Definition, root: Path) -> bool:
    """Whether a time (a line of results/) is of a Definition's reference and workload as they stand; the latter by its
    seed and axes. A Definition without a file in workloads/ has those that its line says."""
    if definition.reference_sha256 != record["reference_sha256"]:
        return False
    path = path_of(definition, root)
    if not path.exists():
        return True
    known = _workloads(path).get(record["workload"])
    axes = {axis: record["axes"].get(axis) for axis in definition.var_axes}  # others may have gone
    return known is not None and (record["seed"], axes) == (known["seed"], known["axes"])


@functools.cache
def _workloads(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(read_text(path, MAX_BYTES))["workloads"]
    return found


def _append(lines: str, path: Path) -> None:
    """The file with these lines at its end, or as it was. Whoever else appends there waits."""
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)  # not of the file, which is replaced
        write_text(path, (path.read_text(encoding="utf-8") if path.exists() else "") + lines)
    finally:
        os.close(parent)


def _record(report: Report, definition: Definition, each: Timetable, one: Measured, when: str) -> dict[str, Any]:
    found = one.summary
    assert found is not None
    clocks = each.clocks
    measured = ("plan", "run", "calls", "inputs", "processes", "ahead")
    return {
        **{"definition": definition.name, "reference_sha256": definition.reference_sha256},
        **{"workload": each.workload, "seed": each.seed, "axes": dict(each.axes)},
        **{"kernel": one.kernel, "library": one.library, "version": one.version},
        **{"seconds": found.seconds, "quartiles": [found.low, found.high]},
        **{name: getattr(found, name) for name in measured},
        **{"bytes": each.bytes, "operations": dict(each.operations), "least_seconds": each.least},
        **{"disputed": found.disputed, "environment": vars(report.environment)},
        **{"clocks": vars(clocks) if isinstance(clocks, Clocks) else clocks, "recorded": when},
    }


def read(root: Path) -> Iterator[dict[str, Any]]:
    """All recorded times, file by file in the order of their names.

    Raises:
        ResultsError: a file cannot be read, or a line is not a JSON object with the expected entries.
    """
    for path in sorted(root.glob("*/*/*.jsonl")):
        try:
            lines = read_text(path, MAX_BYTES).splitlines()
        except UnreadableFile as error:
            raise ResultsError(str(error)) from error
        for number, line in enumerate(lines, 1):
            try:
                found = parse(line.encode()).data
                found["gpu"], found["op_type"] = path.parts[-3], path.parts[-2]
                found["kernel"] = current_label(found["kernel"])
                _ = found["workload"], float(found["seconds"])
                _ = found["definition"], found["reference_sha256"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ResultsError(
                    f"{path}:{number}: no recorded time ({error!r}); schema/results.schema.json describes a line; "
                    f"remove it, and record again: flashinfer-trace bench -d {path.stem} --record {root}"
                ) from error
            yield found
