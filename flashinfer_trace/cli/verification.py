"""flashinfer-trace verify. torch and the families are imported when the command runs, not before."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.cli import completion
from flashinfer_trace.cli.dumps import dump_reports, located
from flashinfer_trace.cli.group import FAILED, NOTHING_VERIFIED, ended_by_signals
from flashinfer_trace.cli.options import (
    CPU_JOBS,
    GPU_JOBS,
    ORACLE_EXAMPLES,
    SEEDS,
    SHARED_FROM,
    counted,
    dataset_root,
    format_option,
    is_file,
    matching_names,
    missing_packages,
    usual_jobs,
)
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.evidence import DRAWN_CASES, REQUIRED_CASES, SEED
from flashinfer_trace.dataset.evidence_run import MOST_DRAWN
from flashinfer_trace.dataset.overlays import is_of_others
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.judging.user_inputs import LARGEST_SIZE, wrong_device

if TYPE_CHECKING:
    from flashinfer_trace.cli.runs import Settings
    from flashinfer_trace.cli.tasks import Task
    from flashinfer_trace.harness.verify import Report


def _parse_plan(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--plan is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise click.UsageError('--plan must be a JSON object such as {"batch_size": 4}')
    return parsed


def parse_axes(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> dict[str, int] | None:
    """The option --axes, which may be repeated."""
    if not texts:
        return None
    values: dict[str, int] = {}
    for part in ",".join(texts).split(","):
        name, separator, value = part.partition("=")
        if not separator or not (value.strip().isascii() and value.strip().isdigit()):
            raise click.UsageError(f"--axes takes k=v,k=v with whole numbers; {part!r} is not of that form")
        axis, size = name.strip(), _size(name.strip(), value.strip())
        if values.setdefault(axis, size) != size:
            raise click.UsageError(f"--axes has two values of {axis}; give one of them")
    return values


def _size(axis: str, digits: str) -> int:
    if len(digits) > len(str(LARGEST_SIZE)) or int(digits) > LARGEST_SIZE:
        raise click.UsageError(f"--axes {axis}={digits:.40}: sizes are whole numbers from 0 to {LARGEST_SIZE}")
    return int(digits)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|GLOB|FILE]...", shell_complete=completion.names)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--against",
    type=click.Choice(["oracle", "kernel", "all"]),
    default="oracle",
    show_default=True,
    help="The result to compare the reference with.",
)
@click.option("--kernel", "kernel_label", help="Run only this kernel, by label or path (implies --against kernel).")
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    help=f"Number of real cases per target [{ORACLE_EXAMPLES}; kernels: {DRAWN_CASES}].",
)
@click.option("--seed", type=SEEDS, default=SEED, show_default=True, help="Seed of all draws.")
@click.option("--axes", multiple=True, callback=parse_axes, help="Run one case with these variable axes: k=v,k=v.")
@click.option("--plan", callback=_parse_plan, help="Run one case with this plan (JSON), as a failure prints it.")
@click.option("--full", is_flag=True, help="Use real sizes on the CPU too, instead of the family's small twin.")
@click.option("--record", is_flag=True, help="Write evidence of the runs that passed on a GPU.")
@click.option(
    "--evidence",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where --record writes [evidence/ of the dataset].",
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Run on a Ray cluster, a GPU for each Definition: auto, local or HOST:PORT.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help=f"Processes at once [1; for {SHARED_FROM} Definitions or more, one for each of up to {CPU_JOBS} processors, "
    f"or {GPU_JOBS} for each GPU].",
)
@format_option
# Longer than other functions here: every option of the command is a parameter.
def verify(
    names: tuple[str, ...],
    device: str,
    against: str,
    kernel_label: str | None,
    examples: int | None,
    seed: int,
    axes: dict[str, int] | None,
    plan: dict[str, Any] | None,
    full: bool,
    record: bool,
    evidence: Path | None,
    cluster: str | None,
    jobs: int | None,
    output_format: str,
) -> None:
    """Prove references against their float64 oracles and the real kernels.

    NAME is a Definition, a glob or a file (default: the whole dataset). A Definition whose embedded reference is older
    than its source in reference/ is stale, which counts as a failure: `flashinfer-trace sync NAME` writes the new one.
    A file may be a dump of FlashInfer's: its reference is judged by the oracle of the Definition here that is closest.

    On a CPU, most cases are those of a small twin of the Definition, and a few have its own sizes. If its inputs are
    too large for these, a line below the table says so (in JSON, only_twin): only --device cuda runs it at its own.

    Exit status: 0 nothing failed and something passed, 1 a failure, 2 wrong usage, 3 nothing was verified because
    everything was skipped or no kernel exists, 130 interrupted, 143 terminated. Each result is printed, and recorded,
    as soon as it is there, also if something ends the run later.
    """
    fixed = axes is not None or plan is not None
    if axes is not None and plan is not None:
        raise click.UsageError("--axes and --plan both fix the case; give one of them")
    if cluster and fixed:
        raise click.UsageError("--cluster is for whole runs; --axes and --plan run one case")
    if evidence is not None and not record:
        raise click.UsageError(f"--evidence {evidence} is where --record writes; give --record too, or neither")
    if (jobs or 1) > 1 and (cluster or fixed):
        raise click.UsageError("--jobs is for whole runs on this machine; leave out --cluster, --axes and --plan")
    root = dataset_root()
    wanted = located(names)
    files = [Path(name) for name in wanted if is_file(name)]
    dumps = [path for path in files if is_of_others(path)]
    patterns = [name for name in wanted if not is_file(name)]
    paths = matching_names(patterns) if patterns or not files else []
    with missing_packages():
        import torch

        from flashinfer_trace.sandbox.worker import reference_worker
    check_device(device, bool(cluster))
    if jobs is None:
        gpus = torch.cuda.device_count() if device == "cuda" else int(device != "cpu")
        jobs = 1 if cluster or fixed or full else usual_jobs(len(paths), gpus)
    if record and not device.startswith("cuda"):
        raise click.UsageError("--record needs --device cuda: only a run of the real kernel is evidence")
    if record and (examples or DRAWN_CASES) < REQUIRED_CASES:
        raise click.UsageError(f"--record needs --examples {REQUIRED_CASES} or more: fewer are not evidence")
    if record and (examples or 0) > MOST_DRAWN:
        raise click.UsageError(f"--record takes --examples {MOST_DRAWN} at most: evidence of more is refused")
    if record and seed != SEED:
        raise click.UsageError(f"--record needs --seed {SEED}: a run with a chosen seed is not evidence")
    if device == "cpu" and not full:
        torch.set_num_threads(1)  # twins are small: more threads would only wait for each other
    # Before harness and families are imported, because a fork of this process must not contain the oracles.
    with nullcontext() if cluster or jobs > 1 else reference_worker(device, full) as worker:
        with missing_packages():
            from flashinfer_trace.cli.reports import Printer
            from flashinfer_trace.cli.runs import Settings
            from flashinfer_trace.cli.tasks import find_tasks, refusals
        chosen = [store.load(name) for name in paths]
        chosen += [Definition.from_file(path) for path in files if path not in dumps]
        tasks = find_tasks(chosen, root, "kernel" if kernel_label else against, kernel_label)
        _warn_of_stale(tasks)
        evidence = (evidence.absolute() if evidence else Path("evidence")) if record else None
        settings = Settings(device, examples, seed, axes, plan, full, evidence, worker)
        judged = _of_dumps(dumps, device)
        rows = [
            *((task.definition.name, task.target) for task in tasks),
            *((one.definition, one.target) for one in judged),
        ]
        printer, status = Printer(rows, output_format), 0
        reports = printer.reports
        with ended_by_signals() as ended:
            try:
                with closing(_reports(tasks, settings, cluster, jobs)) as coming:
                    for report in itertools.chain(judged, coming):
                        printer.add(report)
            except click.ClickException:
                if reports:  # what was found before the error is a whole list, or table
                    printer.finish(root)
                raise
            except KeyboardInterrupt:
                click.echo(f"\ninterrupted: {len(reports)} of {counted(len(tasks), 'run')} finished", err=True)
                status = ended()
    printer.finish(root)
    sys.exit(status or _exit_status(reports, () if reports else refusals(chosen)))


def _of_dumps(paths: Sequence[Path], device: str) -> list[Report]:
    """The reports of dumped references; these are strangers' code, and run in the sandbox only."""
    if not paths:
        return []
    if device != "cpu":
        raise click.UsageError(f"{paths[0]} is a dump: its reference is a stranger's, and runs on --device cpu only")
    return dump_reports(paths)


def _reports(
    tasks: Sequence[Task], settings: Settings, cluster: str | None, jobs: int
) -> Generator[Report, None, None]:
    """The reports as they come: from this process, others of this machine, or a cluster."""
    if jobs > 1:
        from flashinfer_trace.cli.processes import run_in_processes

        yield from run_in_processes(tasks, settings, jobs)
    elif cluster is None:
        from flashinfer_trace.cli.runs import run_tasks

        yield from run_tasks(tasks, settings)
    else:
        with missing_packages("cluster"):
            from flashinfer_trace.cli.cluster import run_on_cluster
        yield from run_on_cluster(tasks, settings, cluster)


def _warn_of_stale(tasks: Sequence[Task]) -> None:
    """Warns, before a run that may take long, that some Definitions will not pass."""
    stale = len({task.definition.name for task in tasks if task.stale})
    if stale:
        who = counted(stale, "Definition")
        click.echo(f"warning: {who} with a reference older than the one in reference/", err=True)


def _exit_status(reports: list[Report], refused: Iterable[str]) -> int:
    if any(report.status in ("failed", "stale") for report in reports):
        return FAILED
    if any(report.status == "passed" for report in reports):
        return 0
    reason = f"everything was skipped, {reports[0].message}" if reports else "the chosen Definitions have no kernel"
    click.echo("\n  ".join([f"nothing was verified: {reason}", *refused]), err=True)
    return NOTHING_VERIFIED


def check_device(device: str, elsewhere: bool = False) -> str:
    """The device as torch names it, a CPU without an index.

    Raises:
        click.UsageError: torch does not see it here; `elsewhere`, any GPU will do.
    """
    if why := wrong_device(device, elsewhere):
        raise click.UsageError(f"--device {device}: {why}")
    return "cpu" if device.partition(":")[0] == "cpu" else device
