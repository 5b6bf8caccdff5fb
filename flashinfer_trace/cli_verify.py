"""flashinfer-trace verify. torch and the families are imported when the command runs, not before."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace import dataset
from flashinfer_trace.definition import Definition, InputError
from flashinfer_trace.ledger import DRAWN_CASES, REQUIRED_CASES

if TYPE_CHECKING:
    from flashinfer_trace.harness.family import Family, Kernel
    from flashinfer_trace.harness.verify import Report

__all__ = ["verify"]

ORACLE_EXAMPLES = 20


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|GLOB]...")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--against",
    type=click.Choice(["oracle", "kernel", "all"]),
    default="oracle",
    show_default=True,
    help="What the reference is compared with.",
)
@click.option("--kernel", "kernel_label", help="Only this kernel (implies --against kernel).")
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    help=f"Real cases for each target [{ORACLE_EXAMPLES}; kernels: {DRAWN_CASES}].",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all draws.")
@click.option("--axes", help="Run one case with these variable axes: k=v,k=v.")
@click.option("--plan", help="Run one case with this plan (JSON), as a failure prints it.")
@click.option("--full", is_flag=True, help="Real sizes on the CPU too, instead of the family's small twin.")
@click.option("--record", is_flag=True, help="Write evidence of what passed on a GPU.")
@click.option(
    "--evidence", type=click.Path(path_type=Path, file_okay=False), help="Where to record [evidence/ of the dataset]."
)
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text")
def verify(
    names: tuple[str, ...],
    device: str,
    against: str,
    kernel_label: str | None,
    examples: int | None,
    seed: int,
    axes: str | None,
    plan: str | None,
    full: bool,
    record: bool,
    evidence: Path | None,
    output_format: str,
) -> None:
    """Prove references against their float64 oracles and the real kernels.

    NAME is a Definition or a glob (default: the whole dataset). Exit status: 0 all passed, 1 a failure, 2 wrong usage.
    """
    try:
        import torch

        from flashinfer_trace.harness.evidence import record as record_evidence
        from flashinfer_trace.harness.inputs import Draws
        from flashinfer_trace.harness.twins import Twins
        from flashinfer_trace.harness.verify import Job
        from flashinfer_trace.harness.verify import verify as run_verification
    except ImportError as error:
        raise click.ClickException(
            f"{error}; `pip install 'flashinfer-trace[verify]'` brings what verify needs"
        ) from error

    _check_device(device, torch)
    if record and not device.startswith("cuda"):
        raise click.UsageError("--record needs --device cuda: only a run of the real kernel is evidence")
    if record and (examples or DRAWN_CASES) < REQUIRED_CASES:
        raise click.UsageError(f"--record needs --examples {REQUIRED_CASES} or more: fewer are not evidence")
    if axes and plan:
        raise click.UsageError("--axes and --plan both fix the case; give one of them")
    if device == "cpu" and not full:
        torch.set_num_threads(1)  # twins are small: more threads only wait for each other
    against = "kernel" if kernel_label else against
    root = dataset.find_root()
    jobs = _jobs(_select(names, root), against, kernel_label)
    reports: list[Report] = []
    twins = Twins()
    with _progress(len(jobs), output_format) as advance:
        for definition, family, kernel in jobs:
            label = f"{definition.name} ({kernel.label if kernel else 'oracle'})"
            advance(label, done=False)
            job = Job(definition, family, kernel, device, full)
            fixed = _plan(job.sized, family, axes, plan, Draws(seed, "cpu"))
            count = examples or (DRAWN_CASES if kernel else ORACLE_EXAMPLES)
            if kernel is None and fixed is None and not full and torch.device(device).type == "cpu":
                report = twins.verify(job, examples=count, seed=seed)
            else:
                report = _skipped(definition, kernel, device, torch) or run_verification(
                    job, examples=count, seed=seed, plan=fixed
                )
            reports.append(report)
            if record and kernel and report.status == "passed" and fixed is None:
                record_evidence(evidence or root / "evidence", definition, kernel, report)
            advance(label, done=True)
    _print(reports, output_format)
    sys.exit(1 if any(report.status == "failed" for report in reports) else 0)


def _check_device(device: str, torch: Any) -> None:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise click.UsageError(f"--device {device}: {str(error).splitlines()[0]}") from error
    if parsed.type not in ("cpu", "cuda"):
        raise click.UsageError(f"--device {device}: verify runs on cpu, cuda or cuda:N")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device here; run on a machine with one, or use cpu")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise click.UsageError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, from cuda:0")


def _select(names: tuple[str, ...], root: Path) -> list[Definition]:
    """Definitions by name or glob; a word that matches nothing is a usage error."""
    paths = dataset.definition_paths(root)
    if not names:
        chosen = [path.stem for path in paths]
    else:
        chosen = []
        for pattern in names:
            matches = [path.stem for path in paths if fnmatch.fnmatchcase(path.stem, pattern)]
            if not matches and any(c in pattern for c in "*?["):
                raise click.UsageError(f"no Definition matches {pattern!r}; `flashinfer-trace list` shows all names")
            chosen += matches or [pattern]
    try:
        return [dataset.load(name, root) for name in dict.fromkeys(chosen)]
    except (dataset.DatasetError, InputError) as error:
        raise click.UsageError(str(error)) from error


def _jobs(
    definitions: list[Definition], against: str, kernel_label: str | None
) -> list[tuple[Definition, Family, Kernel | None]]:
    from flashinfer_trace.families import FamilyError, family_of

    jobs: list[tuple[Definition, Family, Kernel | None]] = []
    for definition in definitions:
        try:
            family = family_of(definition)
        except FamilyError as error:
            raise click.ClickException(str(error)) from error
        if against in ("oracle", "all"):
            jobs.append((definition, family, None))
        if against in ("kernel", "all"):
            kernels = family.kernels_of(definition)
            chosen = [k for k in kernels if kernel_label in (None, k.label, k.path)]
            if kernel_label and not chosen:
                known = ", ".join(k.label for k in kernels)
                raise click.UsageError(f"{definition.name} has no kernel {kernel_label!r}; it has {known}")
            jobs += [(definition, family, kernel) for kernel in chosen]
    return jobs


def _skipped(definition: Definition, kernel: Kernel | None, device: str, torch: Any) -> Report | None:
    """A skipped report with its reason if the kernel cannot run on this device."""
    from flashinfer_trace.harness.verify import Report

    if kernel is None:
        return None
    if torch.device(device).type != "cuda":
        reason: str | None = "kernels need --device cuda"
    else:
        reason = kernel.unavailable(torch.cuda.get_device_capability(device))
    return Report(definition.name, kernel.label, device, status="skipped", message=reason) if reason else None


def _plan(definition: Definition, family: Family, axes: str | None, plan: str | None, draws: Any) -> Any:
    """The one plan that --axes or --plan asks for, or None."""
    if plan:
        try:
            parsed = json.loads(plan)
        except ValueError as error:
            raise click.UsageError(f"--plan is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise click.UsageError('--plan must be a JSON object such as {"batch_size": 4}')
        return parsed
    if not axes:
        return None
    values = {}
    for part in axes.split(","):
        name, separator, value = part.partition("=")
        if not separator or not value.strip().isdigit():
            raise click.UsageError(f"--axes takes k=v,k=v with whole numbers; {part!r} is not")
        values[name.strip()] = int(value)
    unknown = [name for name in values if name not in definition.var_axes]
    if unknown:
        raise click.UsageError(f"{definition.name}: {unknown} are not variable axes; those are {definition.var_axes}")
    try:
        return family.plan_for_axes(definition, values, draws)
    except InputError as error:
        raise click.UsageError(str(error)) from error


class _progress:
    """A progress bar on standard error, where there is a terminal; otherwise silence."""

    def __init__(self, total: int, output_format: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, disable=output_format == "json")
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Any:
        self._progress.start()
        return lambda label, done: self._progress.update(self._task, description=label, advance=int(done))

    def __exit__(self, *error: object) -> None:
        self._progress.update(self._task, description="")
        self._progress.stop()


def _print(reports: list[Report], output_format: str) -> None:
    if output_format == "json":
        click.echo(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, justify in (("Definition", "left"), ("against", "left"), ("result", "left")):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for heading in ("cases", "vacuous", "error/bound", "seconds"):
        table.add_column(heading, justify="right")
    style = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for r in reports:
        verdict = f"[{style[r.status]}]{r.status}[/]"
        worst = "" if r.status == "skipped" else f"{r.worst:.3f}"
        table.add_row(r.definition, r.target, verdict, str(r.cases), str(r.vacuous), worst, f"{r.seconds:.1f}")
    Console().print(table)
    for r in reports:
        if r.message:
            click.echo(f"\n{r.definition} ({r.target}) {r.status}: {r.message}")
    counts = {status: sum(r.status == status for r in reports) for status in style}
    same = sum(bool(r.twin_of) for r in reports)
    note = f"; {same} have the small twin of another and share its cases" if same else ""
    click.echo("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()) + note)
