"""Traces as files: reads those that follow their schema, and writes each file completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flashinfer_trace import json_source
from flashinfer_trace.files import COMPACT, Lines, laid_out, write_text
from tools.kernel_tracing.verify.check import schema_problems

#: Where the traces of the pinned release are.
TRACES = Path("traces")


def dumps(document: dict[str, Any]) -> str:
    """Kernel traces as JSON: one line per field of a kernel, one per chain, one per unresolved call."""
    return laid_out(document, _lines, COMPACT)


def _lines(path: tuple[str, ...], value: Any) -> Lines | None:
    match path:
        case ():
            return Lines(0, closing=0)
        case ("kernels",):
            return Lines(1, closing=0)
        case ("kernels", "*"):
            return Lines(2, closing=1)
        case ("kernels", "*", "chains"):
            return Lines(3)
        case ("unresolved",):
            return Lines(1, first=False)
    return None


def load(path: Path) -> dict[str, Any]:
    """Reads a trace. Raises OSError, which names the file, if it does not exist or is not JSON."""
    try:
        return json_source.load_object(path, json_source.TRACES)
    except json_source.JsonSourceError as error:
        raise OSError(f"{path}: {error}") from error


def load_traces(path: Path) -> dict[str, Any]:
    """Reads kernel traces. Raises OSError if the file does not exist or does not follow the schema."""
    traces = load(path)
    for problem in schema_problems(traces):
        raise OSError(f"{path}: not kernel traces: {problem}; write them again: python -m tools.kernel_tracing")
    return traces


def write(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    check_writable(path)
    write_text(path, text)


def check_writable(*paths: Path | None) -> None:
    """Raise OSError for files that cannot be written, before the work begins."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OSError(f"{path}: no directory {path.parent}")
        if path is not None and path.is_dir():
            raise OSError(f"{path}: is a directory, not a file")


def link_base(report: Path, sources: Path) -> str:
    """The path from a report to the sources, for its links; for a report in traces/, always to `.sources/`."""
    if report.parent.resolve() == TRACES.resolve():
        sources = Path(".sources")
    return Path(os.path.relpath(sources, report.parent)).as_posix() + "/"
