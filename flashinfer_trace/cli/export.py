"""flashinfer-trace export. torch and the families are imported when the command runs, not before."""

from __future__ import annotations

from pathlib import Path

import click

from flashinfer_trace import dataset
from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import echo_json
from flashinfer_trace.cli.options import counted, dataset_root, format_option, matching_names
from flashinfer_trace.cli.verification import missing_packages, progress

__all__ = ["export"]


@click.command()
@click.argument("form", type=click.Choice(["fib", "kernelbench"]))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, metavar="[NAME|GLOB]...", shell_complete=completion.names)
@click.option(
    "--workloads",
    "extent",
    type=click.Choice(["quick", "full"]),
    help="Of a TraceSet: those of a short benchmark, or all [quick].",
)
@format_option
def export(form: str, out: Path, names: tuple[str, ...], extent: str | None, output_format: str) -> None:
    """Write Definitions for another evaluator into the new directory OUT.

    fib: a TraceSet, with workloads and solutions, for `flashinfer-bench run --local OUT`. kernelbench: a problem in
    the form of KernelBench for each Definition with one output and floating-point inputs of one dtype. NAME is a
    Definition or a glob (default: the whole dataset).

    What an evaluator cannot judge is left out, and OUT/left_out.json says why. OUT is complete, or not there at all.
    """
    if form != "fib" and extent is not None:
        raise click.UsageError(f"--workloads {extent} is for fib: {form} has problems without workloads; leave it out")
    root = dataset_root()
    chosen = [dataset.load(name, root) for name in matching_names(names, root)]
    with missing_packages("export"):
        from flashinfer_trace.export.directory import ExportError, new_directory
        from flashinfer_trace.export.kernelbench import write_problems
        from flashinfer_trace.export.trace_set import write_trace_set
    try:
        with new_directory(out) as directory, progress(len(chosen), output_format) as advance:
            if form == "fib":
                summary = write_trace_set(directory, chosen, lambda name: advance(name, True), extent == "full")
            else:
                summary = write_problems(directory, chosen, lambda name: advance(name, True))
            if not summary.definitions:
                reasons = "; ".join(f"{counted(count, 'Definition')}: {reason}" for count, reason in summary.reasons)
                raise ExportError(f"nothing was exported, because nothing that was chosen can be: {reasons}")
    except ExportError as error:
        raise click.UsageError(str(error)) from error
    if output_format == "json":
        counts = {"definitions": summary.definitions, "workloads": summary.workloads, "solutions": summary.solutions}
        echo_json({"out": str(out), **counts, "left_out": summary.left_out})
        return
    parts = [counted(summary.definitions, "Definition"), counted(summary.workloads, "workload")]
    parts += [counted(summary.solutions, "solution")] if summary.solutions else []
    click.echo(f"{out}: {', '.join(parts)}")
    for count, reason in summary.reasons:
        click.echo(f"  left out {counted(count, 'Definition')}: {reason}")
