"""flashinfer-trace bench. torch and the families are imported when the command runs, not before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from flashinfer_trace.cli.verification import check_device, missing_packages
from flashinfer_trace.dataset import store
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import read_text, write_text
from flashinfer_trace.judging.submission import Submission, SubmissionError, from_path

if TYPE_CHECKING:
    from flashinfer_trace.judging.bench import Benchmarks, Report
    from flashinfer_trace.judging.traffic import Workload

__all__ = ["bench"]

#: Seconds for each workload of a short benchmark, and of a whole one.
SECONDS = {"quick": 6.0, "full": 15.0}


@click.command()
@click.argument("kernel", metavar="[FILE.py[:FUNCTION]|SOLUTION.json]", required=False)
@click.option(
    "-d",
    "--definition",
    "names",
    multiple=True,
    metavar="NAME|GLOB",
    shell_complete=completion.names,
    help="What it computes; repeatable.",
)
@click.option(
    "--workloads",
    "chosen",
    default="quick",
    show_default=True,
    help="quick, full, names with commas, or a FILE of names.",
)
@click.option(
    "--seconds",
    type=Duration(min=0),
    help="After which no further inputs are drawn for a workload [quick: 6; others: 15].",
)
@click.option("--against", multiple=True, help="A real kernel to compare with [all that can run here]; repeatable.")
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N.")
@click.option("--warm", is_flag=True, help="Leave the inputs in the cache.")
@click.option("--graph", is_flag=True, help="Replay each call as a CUDA graph.")
@click.option("--seed", type=SEEDS, help="Seed of the judgement [fresh entropy].")
@click.option("--budget", type=Duration(min=0), metavar="SECONDS", help="After which no further Definition is begun.")
@click.option(
    "--record", type=click.Path(file_okay=False, path_type=Path), help="Append the times of real kernels to DIR/<gpu>/."
)
@click.option("--missing", is_flag=True, help="Only Definitions without a time in the DIR of --record on this GPU.")
@click.option("--figure", type=click.Path(dir_okay=False, path_type=Path), help="Draw the roofline into this SVG file.")
@format_option
# Longer than other functions here: every option of the command is a parameter.
def bench(
    kernel: str | None,
    names: tuple[str, ...],
    chosen: str,
    seconds: float | None,
    against: tuple[str, ...],
    device: str,
    warm: bool,
    graph: bool,
    seed: int | None,
    budget: float | None,
    record: Path | None,
    missing: bool,
    figure: Path | None,
    output_format: str,
) -> None:
    """Judge a kernel of your own, then time it on a GPU beside the real kernels of its Definition.

    Without a kernel, the real ones are timed. Each call has a cold cache and each set of inputs is new; every output of
    a timed call is judged. docs/benchmarking.md says how, and what can be believed.

    Of several Definitions, each is printed and recorded as soon as it is timed. One that cannot be is reported, and the
    others go on.

    Exit status: 0 timed, 1 wrong, 2 wrong usage or not judged, 3 no GPU or nothing that could be timed,
    130 interrupted.
    """
    root = dataset_root()
    submission = _submission(kernel)
    definitions = _definitions(names or ((submission.definition,) if submission else ()), root)
    if figure is not None and len(definitions) > 1:
        raise click.UsageError(f"--figure draws one Definition, and {len(definitions)} are chosen")
    if missing and record is None:
        raise click.UsageError("--missing looks into the directory that --record names; give both")
    if record is not None and (warm or graph):
        raise click.UsageError("--record takes times with a cold cache and without --graph")
    with missing_packages(raised=NotJudged):
        import torch

        from flashinfer_trace.judging import bench as benching
        from flashinfer_trace.judging.bench import results
        from flashinfer_trace.judging.bench.environment import environment
    _check_gpu(device, torch)
    check_device(device, torch)
    if missing and record is not None:
        there = results.timed(record, environment(device).gpu, definitions)
        definitions = [one for one in definitions if one.name not in there]
        click.echo(f"{len(there)} recorded, {len(definitions)} missing", err=True)
        if not definitions:
            if output_format == "json":
                echo_json(benching.Benchmarks().to_dict())
            sys.exit(0)
    seconds = SECONDS.get(chosen, SECONDS["full"]) if seconds is None else seconds
    policy = benching.Policy(seconds=seconds, warm=warm, graph=graph)
    numbers = {one.name: number for number, one in enumerate(definitions, 1)}

    def measured(definition: Definition) -> Report:
        if len(definitions) > 1:
            click.echo(f"{definition.name} ({numbers[definition.name]} of {len(definitions)})", err=True)
        return benching.bench(
            submission,
            definition,
            _chosen(definition, chosen),
            device=device,
            policy=policy,
            against=against or None,
            examples=ORACLE_EXAMPLES,
            seed=seed,
            progress=lambda line: click.echo(line, err=True),
        )

    def finished(definition: Definition, report: Report) -> None:
        if record is not None:
            for path in results.append(report, definition, record):
                click.echo(f"recorded in {path}", err=True)
        if output_format == "text":
            _print(report)
        if figure is not None:
            _draw(report, root, figure)

    try:
        found = benching.bench_all(definitions, measured, finished, budget=budget)
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error
    if output_format == "json":
        echo_json(found.to_dict())
    _tell(found, budget)
    sys.exit(_status(found))


def _status(found: Benchmarks) -> int:
    from flashinfer_trace.judging.verdict import Grade

    if any(one.verdict is not None and one.verdict.grade == Grade.NOT_JUDGED for one in found.reports):
        return NOT_JUDGED
    return FAILED if not found.passed else 0 if found.timed else NOTHING_VERIFIED


class _NoGpu(click.ClickException):
    """There is nothing here that could be timed."""

    exit_code = NOTHING_VERIFIED


def _check_gpu(device: str, torch: Any) -> None:
    """Refuses to time a CPU, or without a GPU."""
    if device.partition(":")[0] == "cpu":
        raise click.UsageError(f"--device {device}: bench runs on cuda or cuda:N; the times of a CPU say nothing")
    if not torch.cuda.is_available():
        raise _NoGpu("no GPU: torch sees no CUDA device here, and times of anything else say nothing")


def _definitions(patterns: Sequence[str], root: Path) -> list[Definition]:
    """The Definitions that are named: by globs, or by a Solution."""
    if not any(patterns):
        raise click.UsageError("name the Definition that is timed: -d NAME (`flashinfer-trace list` shows all)")
    return [store.load(name) for name in matching_names(patterns)]


def _tell(found: Benchmarks, budget: float | None) -> None:
    """What could not be timed, and what is left for another time."""
    for name, why in found.failed.items():
        click.echo(f"failed: {name}: {why}", err=True)
    if found.left:
        click.echo(f"the {budget:g} s are over; left: {counted(len(found.left), 'Definition')}", err=True)
        click.echo(" ".join(found.left), err=True)


def _submission(kernel: str | None) -> Submission | None:
    try:
        return from_path(kernel) if kernel else None
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error


def _chosen(definition: Definition, chosen: str) -> list[Workload]:
    """The workloads that were asked for: quick ones, all, or those of a list or a file of names."""
    from flashinfer_trace.judging.traffic import workloads

    if chosen == "full":
        return list(workloads(definition))
    if chosen == "quick":
        every = workloads(definition)
        return [one for one in every if one.quick] or list(every[:2])
    path = Path(chosen)
    names = read_text(path).removeprefix("\ufeff").split() if path.is_file() else chosen.split(",")
    return chosen_workloads(definition, names, f"--workloads {chosen}")


def _draw(report: Report, root: Path, path: Path) -> None:
    """Writes the picture, if the figures of the GPU are known."""
    from flashinfer_trace.judging.bench.figure import roofline_svg
    from flashinfer_trace.judging.costs.roofline import load_gpus

    gpu = next((one for one in load_gpus(root).values() if report.environment.gpu in one.driver_names), None)
    if gpu is None:
        click.echo(f"no figure: schema/gpus.json does not have {report.environment.gpu}", err=True)
    elif not report.timed:
        click.echo("no figure: nothing was timed", err=True)
    else:
        write_text(path, roofline_svg(report, gpu))
        click.echo(f"drawn in {path}", err=True)


def _print(report: Report) -> None:
    if report.verdict is not None:
        click.echo(str(report.verdict))
    where: Any = report.environment
    how = f"{'warm' if report.warm else 'cold'} cache{', CUDA graph' if report.graph else ''}"
    click.echo(f"{report.definition} on {where.gpu}, torch {where.torch}: {how}, {report.seconds:.0f} s")
    if report.timetables:
        click.echo(text_table(report.rows(), right=(2, 3, 4, 5)))
    for each in report.timetables[-1:]:
        clocks: Any = each.clocks
        if isinstance(clocks, str):
            click.echo(f"clocks: {clocks or 'not read'}")
        else:
            lowered = f"; lowered by {', '.join(clocks.throttled)}" if clocks.throttled else ""
            click.echo(
                f"clocks: {clocks.sm} of {clocks.most} MHz, memory {clocks.memory} MHz, {clocks.celsius} C{lowered}"
            )
    for label, why in report.left_out.items():
        click.echo(f"left out: {label}: {why}")
