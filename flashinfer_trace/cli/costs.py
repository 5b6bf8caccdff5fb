"""flashinfer-trace cost. torch and the families are imported when the command runs, not before."""

from __future__ import annotations

import click

from flashinfer_trace import dataset
from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import echo_json
from flashinfer_trace.cli.options import SEEDS, chosen_workloads, dataset_root, format_option, text_table
from flashinfer_trace.cli.verification import missing_packages, parse_axes
from flashinfer_trace.definition import InputError

__all__ = ["cost"]

#: Of a GPU: schema/gpus.schema.json allows no longer one.
LONGEST_NAME = 40


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
    definition = dataset.load(name, root)
    with missing_packages():
        from flashinfer_trace.costs.roofline import load_gpus, roofline
        from flashinfer_trace.costs.shapes import cost_at
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
