"""flashinfer-trace list, show and coverage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from flashinfer_trace import dataset
from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import echo_json
from flashinfer_trace.cli.options import counted, dataset_root, format_option, text_table
from flashinfer_trace.definition import Definition
from flashinfer_trace.kernel_paths import CALLED, KINDS, load_kernel_paths, paths_of_tags
from flashinfer_trace.ledger import proofs
from flashinfer_trace.naming import load_naming

__all__ = ["coverage", "list_definitions", "show"]


@click.command("list")
@click.option("--op-type", shell_complete=completion.op_types, help="Only this op_type, e.g. gemm.")
@click.option("--tag", shell_complete=completion.tags, help="Only Definitions with this tag, e.g. status:verified.")
@format_option
def list_definitions(op_type: str | None, tag: str | None, output_format: str) -> None:
    """List the Definitions of the dataset."""
    root = dataset_root()
    every = list(dataset.definitions(root=root))
    _check_filters(every, root, op_type, tag)
    found = [one for one in every if op_type in (None, one.op_type) and (tag is None or tag in one.tags)]
    if output_format == "json":
        echo_json([{"name": one.name, "op_type": one.op_type, "tags": list(one.tags)} for one in found])
    elif found:
        click.echo(text_table([[one.op_type, one.name, " ".join(one.tag_values("status"))] for one in found]))


def _check_filters(every: list[Definition], root: Path, op_type: str | None, tag: str | None) -> None:
    """Raises a usage error for an op_type or a tag that is neither in use nor listed in schema/naming.json."""
    naming = load_naming(root)
    op_types = {one.op_type for one in every} | {family.op_type for family in naming.families.values()}
    if op_type is not None and op_type not in op_types:
        hint = dataset.closest(op_type, sorted(op_types)) or f"the op_types are {', '.join(sorted(op_types))}"
        raise click.UsageError(f"no op_type {op_type!r}; {hint}")
    tags = {tag for one in every for tag in one.tags} | set(naming.flags)
    tags |= {f"{space.name}:{value}" for space in naming.namespaces.values() for value in space.values}
    if tag is not None and tag not in tags:
        namespace = tag.split(":", 1)[0]
        siblings = sorted(one for one in tags if one.startswith(f"{namespace}:"))
        hint = dataset.closest(tag, siblings) or dataset.closest(tag, sorted(tags))
        spaces = ", ".join(f"{name}:" for name in naming.namespaces)
        raise click.UsageError(f"no Definition has the tag {tag!r}; {hint or f'tags begin with {spaces}'}")


@click.command()
@click.argument("name", shell_complete=completion.names)
@format_option
def show(name: str, output_format: str) -> None:
    """Print one Definition: axes, inputs, outputs, constraints, the kernels that ran, and the reference."""
    definition = dataset.load(name, dataset_root())
    if output_format == "json":
        echo_json(definition.to_dict())
        return
    rows = []
    for axis in definition.axes.values():
        value = "variable" if axis.value is None else str(axis.value)
        rows.append(["  axis", axis.name, value, axis.description])
    for kind, specs in (("input", definition.inputs), ("output", definition.outputs)):
        for spec in specs.values():
            shape = "scalar" if spec.shape is None else f"[{', '.join(spec.shape)}]"
            rows.append([f"  {kind}", spec.name, f"{spec.dtype} {shape}", spec.description])
    click.echo(f"{definition.name} ({definition.op_type})\n{definition.description}\n\n{text_table(rows)}")
    for constraint in definition.constraints:
        click.echo(f"  where   {constraint}")
    own = [tag for tag in definition.tags if tag.partition(":")[0] not in KINDS]
    for kernel, state in kernel_states(definition, dataset_root()):
        click.echo(f"  kernel  {kernel}: {state}")
    click.echo(f"  tags    {' '.join(own)}\n\n{definition.reference}")


def kernel_states(definition: Definition, root: Path) -> list[tuple[str, str]]:
    """Each kernel and what is known of it: the recorded runs first, then kernels that only tags name."""
    known = load_kernel_paths(root)
    states, ran = [], set[str]()
    for entry in proofs(root, definition):
        where = f"ran, {entry.library} {entry.version} on {entry.gpu}, {counted(entry.cases, 'case')}"
        states.append((entry.kernel_label, where))
        ran |= paths_of_tags(known, entry)
    for tag in definition.tags:
        namespace, _, path = tag.partition(":")
        if namespace == CALLED:
            states.append((path, "called by libraries or models; nobody ran it for this Definition"))
        elif namespace in KINDS and path not in ran:
            states.append((path, "awaits its run"))
    return states


@click.command()
@click.option("--model", shell_complete=completion.models, help="Only this model, op by op, e.g. deepseek-v3.")
@click.option("--kernels", is_flag=True, help="The kernels that the model's code calls; needs --model.")
@format_option
def coverage(model: str | None, kernels: bool, output_format: str) -> None:
    """Show which Definitions the models need, and which of them exist and are verified.

    Without --model, print a table of model x op_type. Each cell counts verified/existing/needed Definitions. With
    --kernels, print the kernels that a model's code calls, the Definitions of each, and how many have evidence from it.
    """
    from flashinfer_trace.model_coverage import load_needs, matrix, model_coverages, op_table

    if kernels:
        if model is None:
            raise click.UsageError("--kernels lists the kernels of one model: add --model NAME")
        _kernel_coverage(dataset_root(), load_needs(dataset_root(), model), output_format)
        return
    found = model_coverages(dataset_root(), model)
    if output_format == "json":
        echo_json([asdict(one) for one in found])
    elif model is None:
        click.echo(text_table(matrix(found)))
        click.echo("\nEach cell counts verified/existing/needed Definitions. `--model NAME` lists the ops of a model.")
    else:
        click.echo(text_table(op_table(found[0])))
        for op, reason in found[0].unsupported.items():
            click.echo(f"gap: {op}: {reason}")


def _kernel_coverage(root: Path, needs: Mapping[str, Mapping[str, Any]], output_format: str) -> None:
    """Prints the kernels of one model, with totals."""
    from flashinfer_trace.kernel_coverage import kernel_coverages, kernel_table

    found = [one for needed in needs.values() for one in kernel_coverages(root, needed)]
    if output_format == "json":
        echo_json([asdict(one) for one in found])
        return
    click.echo(text_table(kernel_table(found)))
    defined, proven = sum(bool(one.definitions) for one in found), sum(bool(one.evidence) for one in found)
    for one in needs.values():
        versions = ", ".join(f"{name} {version}" for name, version in one.get("kernel_sources", {}).items())
        click.echo(f"\nthe kernels of {one['model']} in {versions}")
    click.echo(f"{len(found)} kernels, {defined} with Definitions, {proven} with evidence from the kernel")
