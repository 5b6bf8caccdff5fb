"""Messages of the tracers' command lines on standard error: the progress, and problems of the sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from tools.kernel_tracing.report.evaluation import Progress
from tools.kernel_tracing.source.sources import SourceTree, notices


def notice(root: Path, sources: SourceTree) -> None:
    """Prints what the sources lack."""
    for line in notices(root, sources):
        print(f"note: {line}", file=sys.stderr)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on standard error, if that is a terminal."""
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
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading sources", total=None)

        def report(phase: str, done: int, total: int) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield report
