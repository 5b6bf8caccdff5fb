"""flashinfer-trace check, cost and export: for a kernel of your own. torch and the families are imported late."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import FAILED, NOT_JUDGED, NOTHING_VERIFIED, NotJudged, echo_json
from flashinfer_trace.cli.options import (
    ORACLE_EXAMPLES,
    SEEDS,
    Duration,
    chosen_workloads,
    counted,
    dataset_root,
    format_option,
    matching_names,
    text_table,
)
from flashinfer_trace.cli.verification import check_device, missing_packages, parse_axes
from flashinfer_trace.dataset import store
from flashinfer_trace.format.definition import InputError
from flashinfer_trace.judging.server import shared_server
from flashinfer_trace.judging.submission import TIMEOUTS, SubmissionError, Timeouts, from_path

if TYPE_CHECKING:
    from flashinfer_trace.judging.verdict import Verdict

__all__ = ["check", "cost", "export"]

#: Of a GPU: schema/gpus.schema.json allows no longer one.
LONGEST_NAME = 40


@click.command()
@click.argument("kernel", metavar="FILE.py[:FUNCTION]|SOLUTION.json")
@click.option("-d", "--definition", "names", multiple=True, shell_complete=completion.names, help="What it computes.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=ORACLE_EXAMPLES,
    show_default=True,
    help="Number of drawn cases that must count, beside the family's corners.",
)
@click.option("--seed", type=SEEDS, help="Seed of all draws, to repeat a run [fresh entropy].")
@click.option(
    "--twin", is_flag=True, help="Judge at the sizes of the family's small twin [on a CPU where real sizes are slow]."
)
@click.option(
    "--full",
    is_flag=True,
    help="Use real sizes on a CPU even if they are slow: for a kernel with sizes written into it.",
)
@click.option(
    "--timeout",
    type=Duration(*TIMEOUTS),
    help="Seconds that one call may take [60; the first: 300], and loading, which has 30 at least [120].",
)
@click.option("--verbose", is_flag=True, help="Print all that is known of the verdict, not four lines.")
@format_option
def check(
    kernel: str,
    names: tuple[str, ...],
    device: str,
    examples: int,
    seed: int | None,
    twin: bool,
    full: bool,
    timeout: float | None,
    verbose: bool,
    output_format: str,
) -> None:
    """Judge a kernel of your own against a Definition.

    It is a Python file (its function run, its class ModelNew, or the FUNCTION that is named) or a Solution of
    flashinfer-bench in Python or Triton. It takes the Definition's inputs and returns its outputs, or takes the outputs
    as well and writes into them. It runs in a process of its own, with your rights: do not judge code that you would
    not run.

    The answer is four lines: the verdict, the worst element, why its bound is what it is, and how to repeat the run.

    Exit status: 0 reference-grade or kernel-grade, 1 wrong, 2 wrong usage, or a kernel that was not judged (it could
    not be loaded, a package is missing, the GPU has no memory left, it may need --full), 3 no case could have failed,
    130 interrupted.
    """
    if twin and full:
        raise click.UsageError("--twin and --full are different sizes; give one of them")
    if len(names) > 1:
        raise click.UsageError(f"-d names one Definition, not {len(names)}: check {', '.join(names)} one by one")
    dataset_root()
    try:
        submission = from_path(kernel)
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error
    wanted = names[0] if names else submission.definition
    if not wanted:
        raise click.UsageError(
            "name the Definition that the kernel computes: -d NAME (`flashinfer-trace list` shows all)"
        )
    definition = store.load(wanted)
    server = shared_server() if find_spec("torch") else None  # imports torch while this process does
    with missing_packages(raised=NotJudged):
        import torch

        from flashinfer_trace.judging.judge import judge
    device = check_device(device, torch)
    if device == "cpu":
        torch.set_num_threads(1)
    limits = Timeouts() if timeout is None else Timeouts.of(timeout)
    try:
        verdict = judge(
            submission,
            definition,
            device=device,
            examples=examples,
            seed=seed,
            twin=twin if twin or full else None,
            limits=limits,
            server=server,
        )
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error
    if output_format == "json":
        echo_json(verdict.to_dict())
    else:
        click.echo(str(verdict) if verbose else verdict.summary())
        if not verbose and not verdict.kept_apart:
            click.echo("warning: this system did not keep it from the judge's memory; Linux 5.19 can", err=True)
    sys.exit(_status(verdict))


def _status(verdict: Verdict) -> int:
    from flashinfer_trace.judging.verdict import Grade

    if verdict.grade == Grade.NOT_JUDGED:
        return NOT_JUDGED
    return 0 if verdict.passed else FAILED if verdict.failure else NOTHING_VERIFIED


@click.command()
@click.argument("name", shell_complete=completion.names)
@click.option(
    "--axes",
    multiple=True,
    callback=parse_axes,
    help="Values of variable axes: k=v,k=v; the family chooses the others.",
)
@click.option("--seed", type=SEEDS, help="Seed of routing and lengths [0].")
@click.option("--workload", metavar="NAME", help="At these inputs of docs/workloads.md, as decode-64, instead of axes.")
@format_option
def cost(name: str, axes: dict[str, int] | None, seed: int | None, workload: str | None, output_format: str) -> None:
    """Print what a Definition has to move and compute, and the least time that takes on some GPUs.

    Bytes are those of the elements that the result depends on, each read once, and of the result: pages, rows and
    experts that the inputs name, and pairs under the mask. `schema/gpus.json` has the figures of the GPUs.
    """
    root = dataset_root()
    definition = store.load(name)
    with missing_packages():
        from flashinfer_trace.judging.costs.roofline import load_gpus, roofline
        from flashinfer_trace.judging.costs.shapes import cost_at
    if workload is None:
        try:
            found, actual = cost_at(definition, axes or {}, seed or 0)
        except InputError as error:
            raise click.UsageError(str(error)) from error
    elif axes or seed is not None:
        raise click.UsageError(f"--workload {workload} has axes and a seed of its own; leave out --axes and --seed")
    else:
        (chosen,) = chosen_workloads(definition, [workload], "--workload")
        found, actual = chosen.cost(), dict(chosen.axes)
    times = {gpu: roofline(found, each) for gpu, each in load_gpus(root).items()}
    if output_format == "json":
        echo_json(
            {
                **{"definition": name, "axes": actual, "bytes_read": found.bytes_read},
                **{"bytes_written": found.bytes_written, "operations": dict(found.operations)},
                "intensity": found.intensity,
                "seconds": {gpu: None if time is None else time.seconds for gpu, time in times.items()},
            }
        )
        return
    at = ", ".join(f"{axis} = {value}" for axis, value in actual.items())
    click.echo(f"{name} at {f'{workload}: ' if workload else ''}{at}")
    click.echo(f"  reads {found.bytes_read:,} bytes, writes {found.bytes_written:,}")
    operations = ", ".join(f"{count:,} in {dtype}" for dtype, count in found.operations.items())
    click.echo(f"  operations: {operations or 'none'}; {found.intensity:.3g} per byte")
    rows = [["GPU", "least time", "limit"]]
    for gpu, time in times.items():
        limit = ["-", "no arithmetic for a dtype"] if time is None else [microseconds(time.seconds), time.bound]
        rows.append([gpu[:LONGEST_NAME], *limit])
    click.echo(text_table(rows, right=(1,)))


def microseconds(seconds: float) -> str:
    """A time with three digits: ``12.3 us``."""
    return f"{seconds * 1e6:,.3g} us" if seconds < 1e-3 else f"{seconds * 1e6:,.0f} us"


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
    dataset_root()
    chosen = [store.load(name) for name in matching_names(names)]
    with missing_packages("export"):
        from flashinfer_trace.judging.export.directory import ExportError, new_directory
        from flashinfer_trace.judging.export.kernelbench import write_problems
        from flashinfer_trace.judging.export.trace_set import write_trace_set
    try:
        with new_directory(out) as directory, _progress(len(chosen), output_format) as advance:
            if form == "fib":
                summary = write_trace_set(directory, chosen, advance, extent == "full")
            else:
                summary = write_problems(directory, chosen, advance)
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


@contextmanager
def _progress(total: int, output_format: str) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar on standard error if that is a terminal; prints nothing otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    hidden = output_format == "json" or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda label: progress.update(task, description=label, advance=1)
