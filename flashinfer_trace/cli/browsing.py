"""flashinfer-trace list, find, show and coverage."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from flashinfer_trace.cli import completion
from flashinfer_trace.cli.dumps import definition_named, located
from flashinfer_trace.cli.group import echo_json
from flashinfer_trace.cli.options import counted, dataset_root, format_option, is_file, text_table, width
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.dumps import read_dump
from flashinfer_trace.dataset.evidence import Entry, kernels_today, proofs
from flashinfer_trace.dataset.finding import Catalog, check_filters, constants, distinguishing
from flashinfer_trace.dataset.overlays import Overlaid, is_of_others, overlaid, overlays
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.naming import Naming, load_naming
from flashinfer_trace.kernels.names import CALLED, KINDS


@click.command("list")
@click.option("--op-type", shell_complete=completion.op_types, help="Only this op_type, e.g. gemm.")
@click.option(
    "--tag",
    "tags",
    multiple=True,
    shell_complete=completion.tags,
    help="Only Definitions with this tag, e.g. status:verified; repeated, with all of them.",
)
@format_option
def list_definitions(op_type: str | None, tags: tuple[str, ...], output_format: str) -> None:
    """List the Definitions of the dataset, with the constants in which those of the same sizes differ.

    Those of others in a --root follow by their files, with what they resemble here. `flashinfer-trace find` takes words
    instead.
    """
    dataset_root()
    every, others = list(store.definitions()), [one for overlay in overlays() for one in overlay]
    check_filters([*every, *(one.definition for one in others)], load_naming(), op_type, tags)

    def chosen(one: Definition) -> bool:
        return op_type in (None, one.op_type) and {*tags} <= {*one.tags}

    found, others = list(filter(chosen, every)), [one for one in others if chosen(one.definition)]
    differ = distinguishing(every)
    if output_format == "json":
        echo_json([_listed(one) for one in found] + [{**_listed(one.definition), **_told(one)} for one in others])
        return
    rows = [[one.op_type, one.name, " ".join(one.tag_values("status")), _pairs(differ[one.name])] for one in found]
    rows += [[one.definition.op_type, one.file, one.told, ""] for one in others]
    if rows:
        click.echo(text_table(rows))


def _listed(one: Definition) -> dict[str, Any]:
    return {"name": one.name, "op_type": one.op_type, "tags": list(one.tags), "constants": constants(one)}


def _told(one: Overlaid) -> dict[str, Any]:
    """The JSON of a Definition of others: its file, and the one here that it resembles."""
    resembles = one.match.definition.name if one.match else None
    return {"file": one.file, "resembles": resembles, "differs": list(one.differs)}


def _pairs(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="WORD|KEY=VALUE...", shell_complete=completion.words)
@format_option
def find(words: tuple[str, ...], output_format: str) -> None:
    """Find Definitions by words and sizes.

    \b
      flashinfer-trace find llama-3.1-70b tp=8 decode attention

    A word is an op_type, a family, a name (or a glob), a part of these, a stage, a quantization, or a word that
    begins a description. It can also be a model (or the beginning of several names, such as qwen3) or its
    config.json. KEY=VALUE is tp=8, ep=8, model=NAME, an axis or its abbreviation (h=4096), another constant
    (eps=1e-5), op_type, family, name, or a namespace of tags. Each Definition fits all of them. A model and its sizes
    belong together.

    Each Definition is followed by its state: the kernels whose runs verify it, and on which GPU. Those of others in a
    --root follow by their files, each with the Definition here that it resembles and the kernels of that one:
    `flashinfer-trace dump FILE` says whether it is the same.

    Exit status: 0 found, 2 a word that fits nothing, or nothing that fits all of them.
    """
    root = dataset_root()
    words, naming = tuple(_model_word(root, word) for word in words), load_naming()
    catalog, others = Catalog(store.definitions(), naming), list(_of_others(words, naming))
    try:
        found = catalog.find(words)
    except store.DatasetError:
        if not others:
            raise
        found = []
    runs = {one.name: proofs(one.root or root, one) for one in found}
    if output_format == "json":
        echo_json(
            [_found_json(catalog, one, runs[one.name]) for one in found]
            + [{**_found_json(other, one.definition, _runs(one)), **_told(one)} for other, one in others]
        )
        return
    differ = distinguishing(catalog.definitions)
    rows = [[one.name, " ".join(one.tag_values("status")), _ran_on(runs[one.name])] for one in found]
    for row, one in zip(rows, found, strict=True):
        row[1] += f" {_pairs(differ[one.name])}" if differ[one.name] else ""
    rows += [[one.file, one.told, _ran_on(_runs(one))] for _, one in others]
    click.echo(text_table(rows))
    click.echo(f"\n{counted(len(rows), 'Definition')}; `flashinfer-trace show NAME` prints one")


def _of_others(words: Sequence[str], naming: Naming) -> Iterator[tuple[Catalog, Overlaid]]:
    """Yields the Definitions of each overlay that the words find, with its catalog."""
    for overlay in overlays():
        catalog = Catalog((one.definition for one in overlay), naming)
        with suppress(store.DatasetError):
            names = {one.name for one in catalog.find(words)}
            yield from ((catalog, one) for one in overlay if one.definition.name in names)


def _runs(one: Overlaid) -> list[Entry]:
    """The runs of the Definition here that one of others resembles. Whether these prove it, only its values tell."""
    if one.match is None or one.differs or not one.match.exists:
        return []
    return list(proofs(one.match.definition.root or dataset_root(), one.match.definition))


def _model_word(root: Path, word: str) -> str:
    """A word; of a config.json, the model that has its constants."""
    from flashinfer_trace.dataset.coverage import model_of_config

    return f"model={model_of_config(root, Path(word))}" if word.endswith(".json") else word


def _found_json(catalog: Catalog, definition: Definition, runs: Sequence[Entry]) -> dict[str, Any]:
    """The facts of one Definition: `models` has the sizes at which each model needs it, none for all sizes."""
    kernels = [
        {
            "kernel": run.kernel_label,
            "library": run.library,
            "version": run.version,
            "gpu": run.run.gpu,
            "cases": run.cases,
        }
        for run in runs
    ]
    return {
        "name": definition.name,
        "op_type": definition.op_type,
        "family": catalog.family(definition),
        "status": "".join(definition.tag_values("status")),
        "constants": constants(definition),
        "models": catalog.models(definition),
        "kernels": kernels,
    }


def _ran_on(runs: Sequence[Entry]) -> str:
    """``kernel, kernel on GPU``, for each set of GPUs."""
    gpus: dict[str, set[str]] = {}
    for run in runs:
        gpus.setdefault(run.kernel_label, set()).add(run.run.gpu)
    kernels: dict[tuple[str, ...], list[str]] = {}
    for kernel, ran in gpus.items():
        kernels.setdefault(tuple(sorted(ran)), []).append(kernel)
    return "; ".join(f"{', '.join(labels)} on {' and '.join(where)}" for where, labels in kernels.items())


@click.command()
@click.argument("name", metavar="NAME|FILE", shell_complete=completion.names)
@format_option
def show(name: str, output_format: str) -> None:
    """Print one Definition: axes, inputs, outputs, constraints, the kernels that ran, and the reference.

    A FILE may be a Definition or a dump of FlashInfer's.
    """
    root = dataset_root()
    name = located([name])[0]
    other = overlaid(read_dump(Path(name))) if is_file(name) and is_of_others(Path(name)) else None
    definition = other.definition if other else definition_named(name)
    if output_format == "json":
        echo_json(definition.to_dict())
        return
    rows = []
    for axis in definition.axes.values():
        value = "variable" if axis.value is None else str(axis.value)
        rows.append([_styled("  axis"), axis.name, value, axis.description])
    for kind, specs in (("input", definition.inputs), ("output", definition.outputs)):
        for spec in specs.values():
            shape = "scalar" if spec.shape is None else f"[{', '.join(spec.shape)}]"
            rows.append([_styled(f"  {kind}"), spec.name, f"{spec.dtype} {shape}", spec.description])
    heading = f"{click.style(definition.name, bold=True)} ({definition.op_type})"
    click.echo(f"{heading}\n{_wrapped(definition.description)}\n\n{text_table(rows)}")
    for constraint in definition.constraints:
        click.echo(_wrapped(f"  {_styled('where')}   {constraint}", 10))
    own = [tag for tag in definition.tags if tag.partition(":")[0] not in KINDS]
    here = definition if other is None else other.match.definition if other.match and not other.differs else None
    if other is not None:
        click.echo(_wrapped(f"  {_styled('here')}    {'; '.join([other.told, *other.differs])}", 10))
        click.echo(f"          `flashinfer-trace dump {name}` runs it, and says whether it is the same")
    for kernel, state in kernel_states(here, here.root or root) if here else ():
        click.echo(_wrapped(f"  {_styled('kernel')}  {kernel}: {state}", 10))
    tags = _wrapped(f"  {_styled('tags')}    {' '.join(own)}", 10)
    click.echo(f"{tags}\n\n{_highlighted(definition.reference)}")


def _styled(label: str) -> str:
    return click.style(label, fg="cyan")


def _wrapped(text: str, indent: int = 0) -> str:
    """The text in lines that fit the terminal, the later ones indented; as it is if there is none."""
    if not (columns := width()):
        return text
    # Escape codes take no room; a line is at most that much shorter.
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _highlighted(source: str) -> str:
    """The Python source in colors, on a terminal that has them."""
    if not width() or click.get_current_context().color is False:
        return source
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console()
    with console.capture() as captured:
        console.print(Syntax(source, "python", background_color="default", word_wrap=True))
    return captured.get()


def kernel_states(definition: Definition, root: Path) -> list[tuple[str, str]]:
    """Each kernel and what is known of it: the recorded runs first, then kernels that only tags name."""
    computing = kernels_today(root, definition)
    states, ran = [], set[str]()
    for entry in proofs(root, definition):
        where = f"ran, {entry.library} {entry.version} on {entry.run.gpu}, {counted(entry.cases, 'case')}"
        kernel = computing[entry.kernel_label]
        states.append((entry.kernel_label, where + (f", last in {kernel.last_in}" if kernel.last_in else "")))
        ran.update(kernel.tags)
    for tag in definition.tags:
        namespace, _, path = tag.partition(":")
        if namespace == CALLED:
            states.append((path, "called by libraries or models; not run for this Definition yet"))
        elif namespace in KINDS and path not in ran:
            states.append((path, "awaits its run"))
    return states


@click.command()
@click.option(
    "--model", shell_complete=completion.models, help="Only this model, op by op: deepseek-v3, or its config.json."
)
@click.option("--kernels", is_flag=True, help="The kernels that the model's code calls; needs --model.")
@format_option
def coverage(model: str | None, kernels: bool, output_format: str) -> None:
    """Show which Definitions the models need, and which of them exist and are verified.

    Without --model, print a table of model x op_type. Each cell counts verified/existing/needed Definitions. With
    --kernels, print the kernels that a model's code calls, the Definitions of each, and how many have evidence from it.
    """
    from flashinfer_trace.dataset.coverage import load_needs, matrix, model_coverages, op_table

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
    from flashinfer_trace.dataset.coverage import kernel_coverages, kernel_table

    found = kernel_coverages(root, needs.values())
    if output_format == "json":
        echo_json([asdict(one) for one in found])
        return
    click.echo(text_table(kernel_table(found)))
    defined, proven = sum(bool(one.definitions) for one in found), sum(bool(one.evidence) for one in found)
    for one in needs.values():
        versions = ", ".join(f"{name} {version}" for name, version in one.get("kernel_sources", {}).items())
        click.echo(f"\nthe kernels of {one['model']} in {versions}")
    click.echo(f"{len(found)} kernels, {defined} with Definitions, {proven} with evidence from the kernel")
