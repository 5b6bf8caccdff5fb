"""flashinfer-trace check. torch and the families are imported when the command runs, not before."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from flashinfer_trace import dataset
from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import FAILED, NOT_JUDGED, NOTHING_VERIFIED, NotJudged, echo_json
from flashinfer_trace.cli.options import ORACLE_EXAMPLES, SEEDS, Duration, dataset_root, format_option
from flashinfer_trace.cli.verification import check_device, missing_packages
from flashinfer_trace.judging.submission import TIMEOUTS, SubmissionError, from_path

if TYPE_CHECKING:
    from flashinfer_trace.judging.verdict import Verdict

__all__ = ["check"]


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
    output_format: str,
) -> None:
    """Judge a kernel of your own against a Definition.

    It is a Python file (its function run, its class ModelNew, or the FUNCTION that is named) or a Solution of
    flashinfer-bench in Python or Triton. It takes the Definition's inputs and returns its outputs, or takes the outputs
    as well and writes into them. It runs in a process of its own, with your rights: do not judge code that you would
    not run.

    Exit status: 0 reference-grade or kernel-grade, 1 wrong, 2 wrong usage, or a kernel that was not judged (it could
    not be loaded, a package is missing, the GPU has no memory left, it may need --full), 3 no case could have failed,
    130 interrupted.
    """
    if twin and full:
        raise click.UsageError("--twin and --full are different sizes; give one of them")
    if len(names) > 1:
        raise click.UsageError(f"-d names one Definition, not {len(names)}: check {', '.join(names)} one by one")
    root = dataset_root()
    try:
        submission = from_path(kernel)
    except SubmissionError as error:
        raise click.UsageError(str(error)) from error
    wanted = names[0] if names else submission.definition
    if not wanted:
        raise click.UsageError(
            "name the Definition that the kernel computes: -d NAME (`flashinfer-trace list` shows all)"
        )
    definition = dataset.load(wanted, root)
    with missing_packages(raised=NotJudged):
        import torch

        from flashinfer_trace.judging.process import Limits
        from flashinfer_trace.judging.shared import shared_server
    device = check_device(device, torch)
    if device == "cpu":
        torch.set_num_threads(1)
    limits = Limits() if timeout is None else Limits.of(timeout)
    server = shared_server()  # imports torch while this process imports harness and families
    with missing_packages(raised=NotJudged):
        from flashinfer_trace.judging.judge import judge
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
        click.echo(str(verdict))
    sys.exit(_status(verdict))


def _status(verdict: Verdict) -> int:
    from flashinfer_trace.judging.verdict import Grade

    if verdict.grade == Grade.NOT_JUDGED:
        return NOT_JUDGED
    return 0 if verdict.passed else FAILED if verdict.failure else NOTHING_VERIFIED
