"""flashinfer-trace add."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.cli.options import ORACLE_EXAMPLES, dataset_root
from flashinfer_trace.cli.verification import missing_packages
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.add import AddError, new_definition
from flashinfer_trace.dataset.sync import sync, sync_data_files
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import json_text, write_text

if TYPE_CHECKING:
    from flashinfer_trace.harness.verify import Report

__all__ = ["add"]


@click.command()
@click.argument("family")
@click.argument("axes", nargs=-1, required=True, metavar="AXIS=VALUE...")
@click.option("--description", default="", help="What the Definition computes [taken from others of the family].")
def add(family: str, axes: tuple[str, ...], description: str) -> None:
    """Add a Definition of a known family at new sizes: one file, proven against the oracle and valid.

    The file is written into the dataset, or into the last private root (--root, FLASHINFER_TRACE_PATH).

    Contract, tags and texts are those of the family; axes that follow from others can be left out. It stays
    status:unverified until someone records evidence.

    Exit status: 0 written, 1 it is refused, and nothing changed, 2 wrong usage, 130 interrupted.
    """
    values = _values(axes)
    dataset_root()  # warns of code from elsewhere
    root = store.find_roots()[-1]
    data = new_definition(root, family, values, description)
    path = root / "definitions" / data["op_type"] / f"{data['name']}.json"
    report = _proven(Definition.from_dict(data, path))
    if report.status != "passed":
        raise AddError(f"{data['name']} is not written: its reference fails against the oracle; {report.message}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_text(data))
    try:
        changed = sync(root, write=True, names=[data["name"]])
    except BaseException:
        path.unlink(missing_ok=True)
        sync_data_files(root, write=True)  # as they were without it
        raise
    _report(path, data, report, [one for one, _ in changed if one != path])


def _values(axes: Sequence[str]) -> dict[str, int]:
    values: dict[str, int] = {}
    for one in axes:
        axis, _, text = one.partition("=")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise click.UsageError(f"{one!r} is not of the form axis=value with a whole number")
        if values.setdefault(axis, int(text)) != int(text):
            raise click.UsageError(f"{axis} has two values; give one of them")
    return values


def _proven(definition: Definition) -> Report:
    """What verification against the oracle says, if a kernel of the family's record takes these sizes."""
    with missing_packages():
        import torch

        from flashinfer_trace.sandbox.worker import reference_worker
    torch.set_num_threads(1)
    # Before harness and families are imported, because a fork of this process must not contain the oracles.
    with reference_worker("cpu", False) as worker:
        from flashinfer_trace.cli.runs import Settings, run_tasks
        from flashinfer_trace.cli.tasks import Task
        from flashinfer_trace.families import family_of

        family = family_of(definition)
        if not family.kernels_of(definition):
            reasons = [f"  {kernel.label}: {kernel.unsupported(definition)}" for kernel in family.kernels]
            raise AddError("\n".join([f"no kernel of {family.name} takes these sizes; choose others", *reasons]))
        settings = Settings("cpu", ORACLE_EXAMPLES, 0, None, None, False, None, worker)
        (report,) = run_tasks([Task(definition, family, "oracle")], settings)
        return report


def _report(path: Path, data: dict[str, Any], report: Report, others: Sequence[Path]) -> None:
    """Prints what a person must read before the pull request."""
    click.echo(f"{path}: written; {report.cases} cases passed against the oracle")
    for other in others:
        click.echo(f"{other}: updated")
    click.echo(data["description"])
    for section, kind in (("axes", "axis"), ("inputs", "input"), ("outputs", "output")):
        for name, entry in data[section].items():
            value = f" {entry['value']}" if "value" in entry else ""
            click.echo(f"  {kind:6}  {name}{value}: {entry.get('description', '')}")
