"""What the tracers' command lines share: arguments, a progress bar, reading and writing of files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flashinfer_trace.files import write_text
from tools.kernel_tracing.analysis import Progress as Report
from tools.kernel_tracing.check import schema_problems
from tools.kernel_tracing.rules.platforms import PLATFORMS
from tools.kernel_tracing.sources import SourceTree, notices

#: Where the traces of the pinned release are.
TRACES = Path("traces")


def model_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments that say what is traced and where it is written; `name`: the default files, without suffix."""
    parser.add_argument(
        "--model", default="deepseek", help="name of the model's file in sglang/srt/models, without .py"
    )
    parser.add_argument("--sources", type=Path, default=Path(".sources"), metavar="DIR", help="where the sources are")
    parser.add_argument(
        "--entry",
        action="extend",
        nargs="+",
        default=[],
        metavar="MODULE:CLASS",
        help="entry classes, instead of EntryClass",
    )
    parser.add_argument("--platform", choices=PLATFORMS, default="cuda", help="branches of others are left out")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the report (default: traces/{name}.md)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the data (default: traces/{name}.json)")


def load(path: Path) -> dict[str, Any]:
    """A trace from its file. Raises OSError, which names the file, if there is none or it is not JSON."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{path}: not JSON: {error}") from error
    return document


def load_traces(path: Path) -> dict[str, Any]:
    """Kernel traces from their file. Raises OSError if there are none, or if they do not follow their schema."""
    traces = load(path)
    for problem in schema_problems(traces):
        raise OSError(f"{path}: not kernel traces: {problem}; write them again: python -m tools.kernel_tracing")
    return traces


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    check_writable(path)
    write_text(path, text)


def check_writable(*paths: Path | None) -> None:
    """Raise OSError for files that cannot be written, before the work is done."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise OSError(f"{path}: no directory {path.parent}")
        if path is not None and path.is_dir():
            raise OSError(f"{path}: a directory, not a file")


def link_base(report: Path, sources: Path) -> str:
    """What leads from a report to the sources, for its links; in traces/ that is `.sources/`, whatever was read."""
    if report.parent.resolve() == TRACES.resolve():
        sources = Path(".sources")
    return Path(os.path.relpath(sources, report.parent)).as_posix() + "/"


def notice(root: Path, sources: SourceTree) -> None:
    """Say on the terminal's error stream what the sources lack."""
    for line in notices(root, sources):
        print(f"note: {line}", file=sys.stderr)


@contextmanager
def progress() -> Iterator[Report]:
    """A progress bar on the error stream, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_interactive:
        yield lambda phase, done, total: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading sources", total=None)

        def report(phase: str, done: int, total: int) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield report
