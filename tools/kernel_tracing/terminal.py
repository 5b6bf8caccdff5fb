"""What the tracers' command lines share: a progress bar, reading and writing of files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flashinfer_trace.files import write_text
from tools.kernel_tracing.analysis import Progress as Report


def load(path: Path) -> dict[str, Any]:
    """A trace from its file. Raises OSError, which names the file, if there is none or it is not JSON."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{path}: not JSON: {error}") from error
    return document


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    if not path.parent.is_dir():
        raise OSError(f"{path}: no directory {path.parent}")
    write_text(path, text)


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
