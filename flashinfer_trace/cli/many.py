"""flashinfer-trace check-many: hundreds of submissions, in processes of this machine or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click

from flashinfer_trace.cli.group import echo_json, ended_by_signals
from flashinfer_trace.cli.options import (
    ORACLE_EXAMPLES,
    SEEDS,
    RealRange,
    counted,
    dataset_root,
    format_option,
    missing_packages,
    progress,
    text_table,
)
from flashinfer_trace.judging.many import (
    ManyError,
    Results,
    Settings,
    Task,
    judged,
    lost,
    numbers,
    read_tasks,
    summary,
    version,
)
from flashinfer_trace.judging.submission import MEMORY, TIMEOUTS, RunLimits

#: How often a submission is judged whose judge's process died, which memory may have been short for.
ATTEMPTS = 2


@click.command("check-many")
@click.argument(
    "submissions", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SUBMISSIONS.jsonl"
)
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="VERDICTS.jsonl: written, or resumed if it exists.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes at once [one for each processor, or each GPU].")
@click.option(
    "--gpus", metavar="NUMBERS", help="Judge on these GPUs of this machine, such as 0-7, and time what is right."
)
@click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Judge on a Ray cluster: auto, local or HOST:PORT; on a GPU each with --gpus all.",
)
@click.option("--no-times", is_flag=True, help="On GPUs, judge only; several processes can then share one.")
@click.option(
    "--examples", type=click.IntRange(min=1), default=ORACLE_EXAMPLES, show_default=True, help="As for check."
)
@click.option("--seed", type=SEEDS, help="Seed of the first line; line N gets this + N - 1 [fresh entropy each].")
@click.option("--timeout", type=RealRange(*TIMEOUTS), help="Seconds for one call, as for check.")
@click.option("--memory", type=RealRange(*MEMORY), metavar="GIB", help="GiB for a submission, as for check.")
@format_option
# Longer than other functions here: every option of the command is a parameter.
def check_many(
    submissions: Path,
    out: Path,
    jobs: int | None,
    gpus: str | None,
    cluster: str | None,
    no_times: bool,
    examples: int,
    seed: int | None,
    timeout: float | None,
    memory: float | None,
    output_format: str,
) -> None:
    """Judge the submissions of a file, and write one line of JSON for each into another one.

    Each line of SUBMISSIONS.jsonl has one of "file", "source" (Python) and "solution" (of flashinfer-bench), and may
    have "definition", "function" and "id". A run that ended, however it did, goes on when the command is repeated:
    verdicts that are there stay, and none is written twice.

    The summary has pass@k, and fast_p against the fastest real kernel. docs/judge.md shows both files.

    Exit status: 0 all have a line, whatever it says; 2 wrong usage; 130 interrupted.
    """
    dataset_root()
    try:
        devices = _devices(gpus, cluster, jobs, no_times)
        tasks = read_tasks(submissions)
        timed = devices[0] != "cpu" and not no_times
        settings = Settings(devices[0], examples, RunLimits.of(timeout, memory), seed, timed, version())
        with missing_packages():
            import torch  # noqa: F401  # judges need it: better said before the first one starts
        with Results(out, tasks) as results, ended_by_signals() as ended:
            if results.lines:
                click.echo(f"{out}: {len(results.lines)} of {len(tasks)} are done; resuming", err=True)
            try:
                _judge(results, devices, settings, cluster, output_format)
            except KeyboardInterrupt:
                click.echo(f"\ninterrupted: {out} has {len(results.lines)} of {len(tasks)}; repeat to go on", err=True)
                sys.exit(ended())
            found = summary(results.lines)
    except ManyError as error:
        raise click.UsageError(str(error)) from error
    echo_json(found) if output_format == "json" else _print(found)


def _devices(gpus: str | None, cluster: str | None, jobs: int | None, no_times: bool) -> list[str]:
    """The device of each process."""
    if cluster is not None:
        if jobs is not None or gpus not in (None, "all"):
            raise click.UsageError(
                "--cluster shares out its own machines; leave out --jobs, and give --gpus all or none"
            )
        return ["cuda" if gpus else "cpu"]
    if gpus is None:
        return ["cpu"] * (jobs or os.cpu_count() or 1)
    chosen = [f"cuda:{number}" for number in numbers(gpus)]
    with missing_packages():
        import torch
    count = torch.cuda.device_count()
    if missing := [one for one in chosen if int(one.removeprefix("cuda:")) >= count]:
        raise click.UsageError(
            f"--gpus {gpus}: there is no {', '.join(missing)} here; torch sees {counted(count, 'GPU')}"
        )
    if jobs is not None and jobs > len(chosen) and not no_times:
        raise click.UsageError(
            f"--jobs {jobs} on {len(chosen)} GPUs would disturb times; give --no-times to judge only"
        )
    return [chosen[number % len(chosen)] for number in range(jobs or len(chosen))]


def _judge(
    results: Results, devices: Sequence[str], settings: Settings, cluster: str | None, output_format: str
) -> None:
    """Writes the lines that are missing. Those of one Definition come after each other: a process is then faster."""
    missing = sorted(results.missing, key=lambda task: (task.definition, task.line))
    with progress(len(missing), output_format) as advance:
        if cluster is not None:
            coming = _on_cluster(missing, settings, cluster)
        else:
            coming = _in_processes(missing, devices, settings)
        with closing(coming):
            for line in coming:
                results.add(line)
                advance(f"{line['definition']} {line['grade']}")


def _on_cluster(tasks: Sequence[Task], settings: Settings, address: str) -> Generator[dict[str, Any], None, None]:
    with missing_packages("cluster"):
        from flashinfer_trace.cli.cluster import lost as lost_on_ray
        from flashinfer_trace.cli.cluster import run_everywhere
    work = [(task.shipped(), settings) for task in tasks]
    for number, answer in run_everywhere(address, judged_shipped, work, gpu=settings.device != "cpu"):
        failed = isinstance(answer, Exception)
        yield lost(tasks[number], settings, lost_on_ray(answer)) if failed else answer


def judged_shipped(work: tuple[Task, Settings]) -> dict[str, Any]:
    """Runs in a worker of the cluster, on the GPU that Ray gave it."""
    from flashinfer_trace.cli.cluster import own_device

    task, settings = work
    return judged(task, replace(settings, device=own_device(settings.device)))


def _in_processes(
    tasks: Sequence[Task], devices: Sequence[str], settings: Settings
) -> Generator[dict[str, Any], None, None]:
    """Yields the line of each task as it comes from a process for each of the devices."""
    with missing_packages():
        from flashinfer_trace.cli.processes import no_interrupt
    waiting, judges = list(reversed(tasks)), list[_Judge]()
    attempts: dict[tuple[int, str, str], int] = {}
    try:
        with no_interrupt():
            judges += [_Judge(replace(settings, device=device)) for device in devices[: len(tasks)]]
        while waiting or any(one.task for one in judges):
            for one in judges:
                if one.task is None and waiting:
                    one.begin(waiting.pop())
            for one in _answered(judges):
                task = one.task
                assert task is not None
                line = one.answer()
                if line is not None:
                    yield line
                    continue
                attempts[task.key] = attempts.get(task.key, 0) + 1
                if attempts[task.key] < ATTEMPTS:
                    waiting.append(task)
                else:
                    yield lost(task, one.settings, f"its judge's process died {ATTEMPTS} times: {one.died}")
                judges.remove(one)
                if waiting:
                    with no_interrupt():
                        judges.append(_Judge(one.settings))
    finally:
        with no_interrupt():
            for one in judges:
                one.end()


def _answered(judges: Sequence[_Judge]) -> Iterator[_Judge]:
    """The processes that have an answer, or have died: at least one."""
    ready = wait([one.connection for one in judges if one.task])
    yield from [one for one in judges if one.connection in ready]


class _Judge:
    """A process that judges one submission after another.

    Attributes:
        settings: of it, with its device.
        connection: to it.
        task: what it judges now, if anything.
        died: how it ended, once it did.
    """

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.settings, self.died = settings, ""
        self.task: Task | None = None
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=False)
        self._process.start()
        theirs.close()  # else nobody would notice that it has died

    def begin(self, task: Task) -> None:
        self.task = task
        with suppress(OSError):  # it has died: `answer` finds out
            self.connection.send(task)

    def answer(self) -> dict[str, Any] | None:
        """The line; None if the process died."""
        self.task = None
        try:
            line: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            self.end()
            self.died = f"exit code {self._process.exitcode}"
            return None
        return line

    def end(self) -> None:
        """Ends it, if it has not ended."""
        self.connection.close()
        self._process.join(0.0 if self.task else 5.0)
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, settings: Settings) -> None:
    """Runs in the other process, until nobody asks any more. Verdicts have the output of submissions."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that asked ends this one
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            connection.send(judged(connection.recv(), settings))


def _print(found: dict[str, Any]) -> None:
    """The summary."""
    grades = list(found["grades"])
    rows = [
        ["Definition", *grades],
        *([name, *(str(each.get(one, 0)) for one in grades)] for name, each in found["definitions"].items()),
    ]
    click.echo(text_table(rows, right=tuple(range(1, len(grades) + 1))))
    click.echo(f"{found['passed']} of {counted(found['submissions'], 'submission')} are right, {found['timed']} timed")
    if found["codes"]:
        click.echo(f"others: {', '.join(f'{count} {code}' for code, count in found['codes'].items())}")
    click.echo("pass@k: " + ", ".join(f"{k}: {value:.3f}" for k, value in found["pass_at"].items()))
    fast = {p: value for p, value in found["fast"].items() if value is not None}
    told = ", ".join(f"{p}: {value:.3f}" for p, value in fast.items())
    click.echo(f"fast_p: {told}{'' if len(fast) > 1 else ' (no times: they need --gpus)'}")
