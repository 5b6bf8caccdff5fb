"""The command ``flashinfer-trace``. Only `verify`, `check`, `bench`, `cost` and `export` import torch."""

from __future__ import annotations

import os
from pathlib import Path

import click

import flashinfer_trace
from flashinfer_trace.cli.benchmarks import bench
from flashinfer_trace.cli.browsing import coverage, list_definitions, show
from flashinfer_trace.cli.completion import register_bash_completion
from flashinfer_trace.cli.costs import cost
from flashinfer_trace.cli.export import export
from flashinfer_trace.cli.group import CommandGroup
from flashinfer_trace.cli.judgement import check
from flashinfer_trace.cli.maintenance import embed, validate
from flashinfer_trace.cli.verification import verify

__all__ = ["main"]


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flashinfer_trace.__version__)
def main() -> None:
    """GPU-kernel Definitions whose references are proven against the real CUDA kernels.

    The dataset is $FLASHINFER_TRACE_ROOT, or the checkout that contains the current directory, or the installed one.

    To complete commands, names, op_types and tags in bash (for zsh or fish, replace bash):
    eval "$(_FLASHINFER_TRACE_COMPLETE=bash_source flashinfer-trace)"
    """
    # Hypothesis would keep what it learns of the code in the current directory.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(cache / "flashinfer-trace" / "hypothesis"))


for command in (validate, list_definitions, show, coverage, embed, verify, check, bench, cost, export):
    main.add_command(command)
register_bash_completion()
