"""flashinfer-trace check, bench, cost and export: for a kernel of your own. torch and families are imported late."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.cli import completion
from flashinfer_trace.cli.dumps import definition_named, dumped_calls, located
from flashinfer_trace.cli.group import FAILED, NOT_JUDGED, NOTHING_VERIFIED, NotJudged, echo_json
from flashinfer_trace.cli.options import (
    ORACLE_EXAMPLES,
    SEEDS,
    RealRange,
    chosen_workloads,
    counted,
    dataset_root,
    format_option,
    is_file,
    matching_names,
    missing_packages,
    progress,
    text_table,
)
from flashinfer_trace.cli.verification import check_device, parse_axes
from flashinfer_trace.dataset import store
from flashinfer_trace.format.definition import Definition, InputError
from flashinfer_trace.format.files import read_text, write_text
from flashinfer_trace.judging.server import shared_server
from flashinfer_trace.judging.submission import (
    GIBIBYTE,
    MEMORY,
    TIMEOUTS,
    RunLimits,
    Submission,
    SubmissionError,
    from_path,
)

if TYPE_CHECKING:
    from flashinfer_trace.judging.bench import Benchmarks, Policy, Report
    from flashinfer_trace.judging.traffic import Workload
    from flashinfer_trace.judging.verdict import Verdict


#: Characters of a GPU's name: schema/gpus.schema.json allows no more.
LONGEST_NAME = 40


@click.command()
@click.argument("kernel", metavar="FILE.py[:FUNCTION]|SOLUTION.json")
@click.option(
    *("-d", "--definition", "names"),
    multiple=True,
    metavar="NAME|FILE",
    shell_complete=completion.names,
    help="The Definition that it computes: a name, a file, or a dump of FlashInfer.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=ORACLE_EXAMPLES,
    show_default=True,
    help="Number of drawn cases that must count, in addition to the family's corners.",
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
    type=RealRange(*TIMEOUTS),
    help="Seconds for one call [60; the first: 300] and for loading, at least 30 [120].",
)
@click.option(
    "--memory",
    type=RealRange(*MEMORY),
    metavar="GIB",
    help="GiB that its process may add after the kernel starts to load [no limit].",
)
@click.option("--keep-going", is_flag=True, help="Run the other cases after a failure; the tally says which are right.")
@click.option(
    "--save-case",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the first failing case into this new directory: tensors, and a script that repeats the failure.",
)
@click.option("--verbose", is_flag=True, help="Print the whole verdict, not four lines.")
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
    memory: float | None,
    keep_going: bool,
    save_case: Path | None,
    verbose: bool,
    output_format: str,
) -> None:
    """Judge a kernel of your own against a Definition.

    It is a Python file (its function run, its class ModelNew, or the FUNCTION that is named) or a Solution of
    flashinfer-bench in Python or Triton. It takes the Definition's inputs and returns its outputs, or takes the outputs
    as well and writes into them. It runs in a process of its own, with your rights: do not judge code that you would
    not run.

    The answer is four lines: the verdict, the worst element, why its bound is what it is, and how to repeat the run.

    Exit status: 0 reference-grade or kernel-grade, 1 wrong, 2 wrong usage, 3 no case could have failed, 4 not judged, 5
    the command itself ran out of memory, 130 interrupted. A kernel is not judged if it cannot be loaded, a package is
    missing, the GPU has no memory left, or it needs a GPU or --full.
    """
    if twin and full:
        raise click.UsageError("--twin and --full are different sizes; give one of them")
    if len(names) > 1:
        raise click.UsageError(f"-d names one Definition, not {len(names)}: check {', '.join(names)} one by one")
    if save_case is not None and (save_case.exists() or not find_spec("safetensors")):
        why = "exists; name a new directory" if save_case.exists() else "needs safetensors: pip install safetensors"
        raise click.UsageError(f"--save-case {save_case}: {why}")
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
    definition = definition_named(wanted)
    server = shared_server() if find_spec("torch") else None  # imports torch while this process does
    with missing_packages(raised=NotJudged):
        import torch

        from flashinfer_trace.judging.judge import judge
    device = check_device(device)
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        with progress(None, output_format, f"judging {kernel} for {definition.name} on {device}"):
            verdict = judge(
                submission,
                definition,
                device=device,
                examples=examples,
                seed=seed,
                twin=twin if twin or full else None,
                limits=RunLimits.of(timeout, memory),
                server=server,
                keep_going=keep_going,
            )
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error
    if is_file(wanted):
        verdict.replay = verdict.replay.replace(f"-d {definition.name}", f"-d {shlex.quote(wanted)}")
    if output_format == "json":
        echo_json(verdict.to_dict())
    else:
        click.echo(str(verdict) if verbose else verdict.summary())
        if not verbose and not verdict.kept_apart:
            click.echo("warning: this system did not keep it from the judge's memory; Linux 5.19 can", err=True)
    if save_case is not None:
        _save_case(verdict, submission, save_case)
    sys.exit(_status(verdict))


def _save_case(verdict: Verdict, submission: Submission, directory: Path) -> None:
    """Writes the failing case of a verdict, if it has one, whole or not at all."""
    from flashinfer_trace.judging.export.directory import ExportError, new_directory

    case = verdict.failing_case()
    if case is None:
        click.echo("no case was saved: the kernel failed none", err=True)
        return
    try:
        with new_directory(directory) as new:
            case.save(new, submission)
    except ExportError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"saved the failing case in {directory}; `python {directory}/repeat.py` repeats it", err=True)


def _status(verdict: Verdict) -> int:
    from flashinfer_trace.judging.verdict import Grade

    if verdict.grade == Grade.NOT_JUDGED:
        return NOT_JUDGED
    return 0 if verdict.passed else FAILED if verdict.failure else NOTHING_VERIFIED


@click.command()
@click.argument("name", metavar="NAME|FILE", shell_complete=completion.names)
@click.option(
    "--axes",
    multiple=True,
    callback=parse_axes,
    help="Values of variable axes: k=v,k=v; the family chooses the others.",
)
@click.option("--seed", type=SEEDS, help="Seed of routing and lengths [0].")
@click.option("--workload", metavar="NAME", help="A workload of docs/workloads.md, such as decode-64, instead of axes.")
@format_option
def cost(name: str, axes: dict[str, int] | None, seed: int | None, workload: str | None, output_format: str) -> None:
    """Print what a Definition has to move and compute, and the least time that takes on some GPUs.

    Bytes are those of the elements that the result depends on, each read once, and of the result: pages, rows and
    experts that the inputs name, and pairs under the mask. `schema/gpus.json` has the figures of the GPUs.
    """
    root = dataset_root()
    definition = definition_named(name)
    with missing_packages():
        from flashinfer_trace.judging.costs.shapes import cost_at
        from flashinfer_trace.judging.costs.work import load_gpus, microseconds, roofline
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
                **{"definition": definition.name, "axes": actual, "bytes_read": found.bytes_read},
                **{"bytes_written": found.bytes_written, "operations": dict(found.operations)},
                "intensity": found.intensity,
                "seconds": {gpu: None if time is None else time.seconds for gpu, time in times.items()},
            }
        )
        return
    at = ", ".join(f"{axis} = {value}" for axis, value in actual.items())
    click.echo(f"{definition.name} at {f'{workload}: ' if workload else ''}{at}")
    click.echo(f"  reads {found.bytes_read:,} bytes, writes {found.bytes_written:,}")
    operations = ", ".join(f"{count:,} in {dtype}" for dtype, count in found.operations.items())
    click.echo(f"  operations: {operations or 'none'}; {found.intensity:.3g} per byte")
    rows = [["GPU", "least time", "limit"]]
    for gpu, time in times.items():
        limit = ["-", "no arithmetic for a dtype"] if time is None else [microseconds(time.seconds), time.bound]
        rows.append([gpu[:LONGEST_NAME], *limit])
    click.echo(text_table(rows, right=(1,)))


@click.command()
@click.argument("form", type=click.Choice(["fib", "kernelbench", "apply"]))
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, metavar="[NAME|GLOB|FILE]...", shell_complete=completion.names)
@click.option("--kernel", metavar="FILE.py[:FUNCTION]", help="For apply: your kernel; FUNCTION is run unless named.")
@click.option(
    "--workloads",
    "extent",
    type=click.Choice(["quick", "full"]),
    help="For a TraceSet: the workloads of a short benchmark, or all [quick].",
)
@format_option
def export(
    form: str, out: Path, names: tuple[str, ...], kernel: str | None, extent: str | None, output_format: str
) -> None:
    """Write Definitions for another evaluator into the new directory OUT.

    fib: a TraceSet, with workloads and solutions, for `flashinfer-bench run --local OUT`. kernelbench: a problem in
    the form of KernelBench for each Definition with one output and floating-point inputs of one dtype. NAME is a
    Definition or a glob (default: the whole dataset).

    apply: solutions for flashinfer.trace_apply with your --kernel, for the calls whose dumps are the FILEs.
    OUT/guard.py enables them, for no call that differs in what trace_apply's key leaves out, such as an epsilon.

    OUT/left_out.json names everything that an evaluator cannot judge, and why. OUT is complete, or not there at all.
    """
    if form != "fib" and extent is not None:
        raise click.UsageError(f"--workloads {extent} is for fib: {form} has problems without workloads; leave it out")
    if (form == "apply") != (kernel is not None):
        raise click.UsageError("apply writes solutions with your --kernel, and only apply does")
    dataset_root()
    if form == "apply":
        calls = dumped_calls(names)
        chosen = [match.definition for _, match in calls]
    else:
        chosen = [store.load(name) for name in matching_names(names)]
    with missing_packages():
        from flashinfer_trace.judging.export.apply import write_solutions
        from flashinfer_trace.judging.export.directory import ExportError, new_directory
        from flashinfer_trace.judging.export.kernelbench import write_problems
        from flashinfer_trace.judging.export.trace_set import write_trace_set
    try:
        with new_directory(out) as directory, progress(len(chosen), output_format) as advance:
            if form == "fib":
                summary = write_trace_set(directory, chosen, advance, extent == "full")
            elif kernel is not None:
                file, _, function = kernel.partition(":")
                summary = write_solutions(directory, calls, Path(file), function or "run")
            else:
                summary = write_problems(directory, chosen, advance)
            if not summary.rows:
                reasons = "; ".join(f"{counted(count, 'Definition')}: {reason}" for count, reason in summary.reasons)
                raise ExportError(f"nothing was exported, because nothing that was chosen can be: {reasons}")
    except ExportError as error:
        raise click.UsageError(str(error)) from error
    if output_format == "json":
        echo_json({"out": str(out), **summary.counts, "left_out": summary.left_out})
        return
    counts = summary.counts
    parts = [counted(counts["definitions"], "Definition")]
    parts += [counted(counts["workloads"], "workload")] if form != "apply" else []
    parts += [counted(counts["solutions"], "solution")] if counts["solutions"] else []
    click.echo(f"{out}: {', '.join(parts)}")
    for count, reason in summary.reasons:
        click.echo(f"  left out {counted(count, 'Definition')}: {reason}")


#: Seconds for each workload of a short benchmark, and of a whole one.
SECONDS = {"quick": 6.0, "full": 15.0}


@click.command()
@click.argument("kernels", metavar="[FILE.py[:FUNCTION]|SOLUTION.json]...", nargs=-1)
@click.option(
    "-d",
    "--definition",
    "names",
    multiple=True,
    metavar="NAME|GLOB|FILE",
    shell_complete=completion.names,
    help="The Definition that it computes; repeatable.",
)
@click.option(
    "--workloads",
    "chosen",
    default="quick",
    show_default=True,
    help="quick, full, largest (of those that fit --memory), names with commas, or a FILE of names.",
)
@click.option(
    "--memory",
    type=RealRange(*MEMORY),
    metavar="GIB",
    help="GiB of the GPU to use; workloads whose kernels need more are skipped [all that is free].",
)
@click.option(
    "--seconds",
    type=RealRange(min=0),
    help="Seconds after which no further inputs are drawn for a workload [quick: 6; others: 15].",
)
@click.option("--against", multiple=True, help="A real kernel to compare with [all that can run here]; repeatable.")
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N.")
@click.option("--warm", is_flag=True, help="Leave the inputs in the cache.")
@click.option("--graph", is_flag=True, help="Replay each call as a CUDA graph.")
@click.option("--seed", type=SEEDS, help="Seed of the judgment [fresh entropy].")
@click.option(
    "--budget", type=RealRange(min=0), metavar="SECONDS", help="Seconds after which no further Definition starts."
)
@click.option(
    "--record", type=click.Path(file_okay=False, path_type=Path), help="Append the times of real kernels to DIR/<gpu>/."
)
@click.option("--missing", is_flag=True, help="Only Definitions without a time in the DIR of --record on this GPU.")
@click.option("--figure", type=click.Path(dir_okay=False, path_type=Path), help="Draw the roofline into this SVG file.")
@format_option
# Longer than other functions here: every option of the command is a parameter.
def bench(
    kernels: tuple[str, ...],
    names: tuple[str, ...],
    chosen: str,
    memory: float | None,
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
    """Judge kernels of your own, then time them on a GPU next to the real kernels of their Definition.

    Without a kernel, the real ones are timed. Several are compared in one run, on the same inputs' shapes and clocks.
    Each call has a cold cache and each set of inputs is new; every output of a timed call is judged.
    docs/benchmarking.md says how, and what can be believed.

    Of several Definitions, each is printed and recorded as soon as it is timed. One that cannot be is reported, and the
    others go on.

    Exit status: 0 timed, 1 wrong, 2 wrong usage, 3 no GPU or nothing that could be timed, 4 not judged, 5 the command
    itself ran out of memory, 130 interrupted.
    """
    root = dataset_root()
    submissions = [_submission(kernel) for kernel in kernels]
    definitions = _definitions(names or tuple({one.definition for one in submissions} - {""}), root)
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
    check_device(device)
    if missing and record is not None:
        there = results.timed(record, environment(device).gpu, definitions)
        definitions = [one for one in definitions if one.name not in there]
        click.echo(f"{len(there)} recorded, {len(definitions)} missing", err=True)
        if not definitions:
            if output_format == "json":
                echo_json(benching.Benchmarks().to_dict())
            sys.exit(0)
    seconds = SECONDS.get(chosen, SECONDS["full"]) if seconds is None else seconds
    budget_bytes = None if memory is None else int(memory * GIBIBYTE)
    policy = benching.Policy(seconds=seconds, warm=warm, graph=graph, memory=budget_bytes)
    numbers = {one.name: number for number, one in enumerate(definitions, 1)}

    def measured(definition: Definition) -> Report:
        if len(definitions) > 1:
            click.echo(f"{definition.name} ({numbers[definition.name]} of {len(definitions)})", err=True)
        return benching.bench(
            submissions,
            definition,
            _chosen(definition, chosen, policy),
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
    sys.exit(_bench_status(found))


def _bench_status(found: Benchmarks) -> int:
    from flashinfer_trace.judging.verdict import Grade

    if any(verdict.grade == Grade.NOT_JUDGED for one in found.reports for verdict in one.verdicts):
        return NOT_JUDGED
    return FAILED if not found.passed else 0 if found.timed else NOTHING_VERIFIED


class _NoGpu(click.ClickException):
    """There is nothing here that could be timed."""

    exit_code = NOTHING_VERIFIED


def _check_gpu(device: str, torch: Any) -> None:
    """Refuses to time a CPU, or without a GPU."""
    if device.partition(":")[0] == "cpu":
        raise click.UsageError(f"--device {device}: bench runs on cuda or cuda:N, not on a CPU")
    if not torch.cuda.is_available():
        raise _NoGpu("no GPU: torch sees no CUDA device here, and bench needs one")


def _definitions(patterns: Sequence[str], root: Path) -> list[Definition]:
    """The Definitions that are named: by globs, or by a Solution."""
    if not any(patterns):
        raise click.UsageError("name the Definition that is timed: -d NAME (`flashinfer-trace list` shows all)")
    wanted = located(patterns)
    files = [definition_named(one) for one in wanted if is_file(one)]
    names = [one for one in wanted if not is_file(one)]
    return [*files, *map(store.load, matching_names(names) if names else ())]


def _tell(found: Benchmarks, budget: float | None) -> None:
    """Tells which Definitions could not be timed, and which are left for another time."""
    for name, why in found.failed.items():
        click.echo(f"failed: {name}: {why}", err=True)
    if found.left:
        click.echo(f"the {budget:g} s are over; left: {counted(len(found.left), 'Definition')}", err=True)
        click.echo(" ".join(found.left), err=True)


def _submission(kernel: str) -> Submission:
    try:
        return from_path(kernel)
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error


def _chosen(definition: Definition, chosen: str, policy: Policy) -> list[Workload]:
    """The workloads that were asked for: quick ones, all, the largest that fits, or those that a list or file names."""
    from flashinfer_trace.judging.bench.measure import workload_bytes
    from flashinfer_trace.judging.traffic import workloads

    if chosen == "largest":
        sizes = [(workload_bytes(definition, one), number, one) for number, one in enumerate(workloads(definition))]
        fitting = [size for size in sizes if not policy.too_large(size[0])] or [min(sizes)]
        return [max(fitting)[2]]
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
    from flashinfer_trace.judging.costs.work import load_gpus

    gpu = next((one for one in load_gpus(root).values() if report.environment.gpu in one.driver_names), None)
    if gpu is None:
        click.echo(f"no figure: schema/gpus.json does not have {report.environment.gpu}", err=True)
    elif not report.timed:
        click.echo("no figure: nothing was timed", err=True)
    else:
        write_text(path, roofline_svg(report, gpu))
        click.echo(f"drawn in {path}", err=True)


def _print(report: Report) -> None:
    for verdict in report.verdicts:
        click.echo(str(verdict))
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
