"""The command ``flashinfer-trace``. torch is imported by commands that judge, verify, add, bench, cost and export."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import click

import flashinfer_trace
from flashinfer_trace.cli.browsing import coverage, find, list_definitions, show
from flashinfer_trace.cli.completion import register_bash_completion
from flashinfer_trace.cli.dumps import dump
from flashinfer_trace.cli.group import CommandGroup
from flashinfer_trace.cli.judgment import bench, check, cost, export
from flashinfer_trace.cli.maintenance import add, sync, validate
from flashinfer_trace.cli.many import check_many
from flashinfer_trace.cli.verification import verify
from flashinfer_trace.format.roots import PATH_VARIABLE


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flashinfer_trace.__version__)
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="Private Definitions, dumps or a TraceSet, laid over the dataset; repeatable. Also $FLASHINFER_TRACE_PATH, "
    "separated as in PATH.",
)
@click.pass_context
def main(context: click.Context, roots: tuple[str, ...]) -> None:
    """GPU-kernel Definitions whose references are proven against the real CUDA kernels.

    The dataset is $FLASHINFER_TRACE_ROOT, or the checkout that contains the current directory, or the installed one.

    To complete commands, names, op_types and tags in bash (for zsh or fish, replace bash):

    \b
      eval "$(_FLASHINFER_TRACE_COMPLETE=bash_source flashinfer-trace)"
    """
    if roots:  # in the environment, where processes that the command starts find them too
        before = os.environ.get(PATH_VARIABLE, "")
        os.environ[PATH_VARIABLE] = os.pathsep.join(filter(None, [*map(os.path.abspath, roots), before]))
        context.call_on_close(functools.partial(os.environ.__setitem__, PATH_VARIABLE, before))
    # Hypothesis would keep what it learns of the code in the current directory.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(cache / "flashinfer-trace" / "hypothesis"))


for command in (
    validate,
    list_definitions,
    find,
    show,
    coverage,
    add,
    sync,
    verify,
    check,
    check_many,
    bench,
    cost,
    export,
    dump,
):
    main.add_command(command)
register_bash_completion()
