"""flashinfer-trace: validate | list | show | coverage | verify | embed. Only `verify` imports torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

import flashinfer_trace
from flashinfer_trace import dataset
from flashinfer_trace.definition import Definition, InputError

FORMATS = click.Choice(["text", "json"])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(flashinfer_trace.__version__)
def main() -> None:
    """GPU-kernel Definitions whose references are proven against the real CUDA kernels."""


@main.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--format", "output_format", type=FORMATS, default="text", help="How problems are printed.")
def validate(paths: tuple[Path, ...], output_format: str) -> None:
    """Check Definitions (files or directories; default: the whole dataset) against schema and conventions.

    Exit status: 0 clean, 1 problems, 2 wrong usage.
    """
    from flashinfer_trace.validation import format_json, format_text, validate_paths

    root = _root()
    missing = [path for path in paths if not path.exists() and not path.is_symlink()]
    if missing:
        raise click.UsageError(f"no such file or directory: {missing[0]}")
    result = validate_paths(list(paths) or [root], root)
    if output_format == "json":
        click.echo(format_json(result))
    else:
        if result.problems:
            click.echo(format_text(result))
        verdict = f"{len(result.problems)} problems" if result.problems else "no problems"
        click.echo(f"{result.checked} Definitions checked, {verdict}")
    sys.exit(1 if result.problems else 0)


@main.command("list")
@click.option("--op-type", help="Only this op_type, e.g. gemm.")
@click.option("--tag", help="Only Definitions with this tag, e.g. status:verified.")
@click.option("--format", "output_format", type=FORMATS, default="text", help="How the list is printed.")
def list_definitions(op_type: str | None, tag: str | None, output_format: str) -> None:
    """List the Definitions of the dataset."""
    found = list(dataset.definitions(op_type, tag, _root()))
    if output_format == "json":
        rows = [{"name": d.name, "op_type": d.op_type, "tags": list(d.tags)} for d in found]
        click.echo(json.dumps(rows, indent=2))
        return
    for definition in found:
        click.echo(f"{definition.op_type:12} {definition.name:70} {' '.join(definition.tag_values('status'))}")


@main.command()
@click.argument("name")
def show(name: str) -> None:
    """Print one Definition: axes, inputs, outputs, constraints and the reference."""
    definition = _load(name)
    click.echo(f"{definition.name} ({definition.op_type})\n{definition.description}\n")
    for axis in definition.axes.values():
        value = "variable" if axis.value is None else str(axis.value)
        click.echo(f"  axis   {axis.name:24} {value:>10}  {axis.description}")
    for kind, specs in (("input", definition.inputs), ("output", definition.outputs)):
        for spec in specs.values():
            shape = "scalar" if spec.shape is None else f"[{', '.join(spec.shape)}]"
            click.echo(f"  {kind:6} {spec.name:24} {spec.dtype} {shape}  {spec.description}")
    for constraint in definition.constraints:
        click.echo(f"  where  {constraint}")
    click.echo(f"  tags   {' '.join(definition.tags)}\n\n{definition.reference}")


@main.command()
@click.option("--model", help="Only this model, op by op, e.g. deepseek-v3.")
@click.option("--format", "output_format", type=FORMATS, default="text", help="How the matrix is printed.")
def coverage(model: str | None, output_format: str) -> None:
    """Show which Definitions the models need, and which of them exist and are verified.

    Without --model: model x op_type, each cell verified/existing/needed Definitions.
    """
    from dataclasses import asdict

    from flashinfer_trace import coverage as covered

    try:
        found = covered.coverage(_root(), model)
    except dataset.DatasetError as error:
        raise click.UsageError(str(error)) from error
    if output_format == "json":
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
    elif model is None:
        click.echo(covered.text_table(covered.matrix(found)))
        click.echo("\nEach cell: verified/existing/needed Definitions. `--model NAME` lists the ops of one model.")
    else:
        click.echo(covered.text_table(covered.op_table(found[0])))
        for op, reason in found[0].unsupported.items():
            click.echo(f"without a family: {op}: {reason}")


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME|GLOB]...")
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a Definition is out of date.")
def embed(names: tuple[str, ...], check: bool) -> None:
    """Bring the Definitions in line with reference/ and evidence/.

    Writes each family's reference into its Definitions, and sets status:verified where evidence/ proves exactly that
    reference, status:unverified elsewhere. NAME is a Definition or a glob (default: the whole dataset).
    """
    from flashinfer_trace.embedding import EmbeddingError, embed_all

    try:
        changed = embed_all(_root(), write=not check, names=names)
    except EmbeddingError as error:
        raise click.ClickException(str(error)) from error
    for path, what in changed:
        click.echo(f"{path}: {what} {'is out of date; run `flashinfer-trace embed`' if check else 'updated'}")
    click.echo(f"{len(changed)} Definitions {'out of date' if check else 'updated'}")
    sys.exit(1 if check and changed else 0)


def _root() -> Path:
    try:
        return dataset.find_root()
    except dataset.DatasetError as error:
        raise click.ClickException(str(error)) from error


def _load(name: str) -> Definition:
    try:
        return dataset.load(name, _root())
    except (dataset.DatasetError, InputError) as error:
        raise click.UsageError(str(error)) from error


# Registered last: its options are many, and it is the one command that needs torch.
from flashinfer_trace.cli_verify import verify  # noqa: E402

main.add_command(verify)
