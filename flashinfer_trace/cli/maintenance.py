"""flashinfer-trace add, validate and sync. Imports are deferred until they run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import FAILED, echo_json, echo_json_text
from flashinfer_trace.cli.options import (
    ORACLE_EXAMPLES,
    counted,
    dataset_root,
    format_option,
    matching_names,
    missing_packages,
    progress,
)
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.dumps import has_keys_of_dumps
from flashinfer_trace.dataset.overlays import is_overlaid, overlays
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import json_text, write_text
from flashinfer_trace.judging.user_inputs import LARGEST_SIZE

if TYPE_CHECKING:
    from flashinfer_trace.harness.verify import Report

#: Directories of JSON files that are neither Definitions nor evidence, what they have, and what checks it.
OTHER_FILES = (
    ("models", "the constants of a model", "pytest tests/test_models.py"),
    ("workloads", "recorded traffic", "pytest tests/traffic"),
)


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--release", is_flag=True, help="Also report kernels that lack a run of today's stack, judged by today's code."
)
@format_option
def validate(paths: tuple[Path, ...], release: bool, output_format: str) -> None:
    """Check Definitions (files or directories; default: the whole dataset) against the schema and conventions.

    Exit status: 0 clean, 1 problems, 2 wrong usage, 130 interrupted.
    """
    from flashinfer_trace.dataset.validation import Result, format_json, format_text, validate_paths

    root = dataset_root()
    others = sum(map(len, overlays())) if not paths else 0  # an unusable file of theirs is an error
    missing = [path for path in paths if not path.exists() and not path.is_symlink()]
    if missing:
        raise click.UsageError(f"no such file or directory: {missing[0]}")
    for path in paths:
        _refuse_other_files(path, root)
    own = {one: [path for path in paths if store.root_of(path) == one] for one in store.find_roots()}
    total = None if paths else len(store.definition_paths())
    with progress(total, output_format, "reading") as advance:
        results = [
            validate_paths(chosen or [one], one, release=release, advance=advance)
            for one, chosen in own.items()
            if chosen or not paths
        ]
    result = Result(sum(one.checked for one in results), [problem for one in results for problem in one.problems])
    if output_format == "json":
        echo_json_text(format_json(result))
    else:
        if result.problems:
            click.echo(format_text(result))
        verdict = counted(len(result.problems), "problem") if result.problems else "no problems"
        if paths and not result.checked:
            what = "no Definition among these files; their content was checked"
            click.echo(f"{what}, {verdict}; `flashinfer-trace validate` checks the dataset, {root}")
        else:
            click.echo(f"{counted(result.checked, 'Definition')} checked, {verdict}; dataset: {root}")
        if others:
            what = f"{counted(others, 'Definition')} of other programs not checked"
            click.echo(f"{what}; `flashinfer-trace dump` compares them with the dataset")
    sys.exit(FAILED if result.problems else 0)


def _refuse_other_files(path: Path, root: Path) -> None:
    """Raises a usage error for a file of another kind, with what checks that."""
    if is_overlaid(path) or (path.suffix == ".json" and path.is_file() and has_keys_of_dumps(path)):
        what = "holds Definitions of other programs" if path.is_dir() else "is a Definition of another program"
        raise click.UsageError(f"{path} {what}; `flashinfer-trace dump {path}` says what it is here")
    try:
        directory = path.resolve().relative_to(root.resolve()).parts[:1]
    except (ValueError, OSError, RuntimeError):  # the last before Python 3.13, for a link that leads to itself
        return
    for name, what, check in OTHER_FILES:
        if directory == (name,):
            raise click.UsageError(f"{path} is not a Definition but {what}; in a checkout, `{check}` checks it")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|GLOB|FILE]...", shell_complete=completion.names)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a file is out of date.")
@format_option
def sync(names: tuple[str, ...], check: bool, output_format: str) -> None:
    """Bring everything that is derived and committed up to date, in one pass.

    In a checkout, these are first the data files that follow from models/ and traces/. Then come the
    Definitions (names, globs or changed files; default: all): the reference of their family, status:verified where
    evidence/ proves exactly that reference and status:unverified elsewhere, and all other tags.

    Exit status: 0 done, 1 a file cannot be brought up to date or, with --check, is out of date, 2 wrong usage,
    130 interrupted.
    """
    from flashinfer_trace.dataset.sync import sync as bring_up_to_date

    root = dataset_root()
    changed: list[tuple[Path, str]] = []
    chosen = _chosen(names)
    for one in store.find_roots():
        own = [path.stem for path in store.definition_paths(one) if path.stem in chosen]
        if own or not chosen:
            changed += bring_up_to_date(one, write=not check, names=own)
    if output_format == "json":
        files = [{"file": path.relative_to(store.root_of(path)).as_posix(), "change": what} for path, what in changed]
        echo_json({"root": str(root), "written": not check, "changed": files})
    else:
        for path, what in changed:
            state = f"is out of date; run `flashinfer-trace {' '.join(['sync', *names])}`" if check else "updated"
            click.echo(f"{path}: {what} {state}")
        click.echo(f"{counted(len(changed), 'file')} {'out of date' if check else 'updated'}; dataset: {root}")
    sys.exit(FAILED if check and changed else 0)


def _chosen(names: Sequence[str]) -> list[str]:
    """The Definitions that names, globs and files stand for; none stands for all."""
    from flashinfer_trace.dataset.sync import names_of_files

    files = [Path(name) for name in names if "/" in name]
    of_files = [name for root in store.find_roots() for name in names_of_files(root, files)]
    if files and not of_files:
        return []
    patterns = [name for name in names if "/" not in name]
    return [*of_files, *(matching_names(patterns) if patterns else ())]


@click.command()
@click.argument("family")
@click.argument("axes", nargs=-1, required=True, metavar="AXIS=VALUE...")
@click.option("--description", default="", help="Text of the Definition [taken from others of the family].")
def add(family: str, axes: tuple[str, ...], description: str) -> None:
    """Add a Definition of a known family at new sizes: one file, proven against the oracle and valid.

    The file is written into the dataset, or into the last private root (--root, FLASHINFER_TRACE_PATH).

    Contract, tags and texts are those of the family; axes that follow from others can be left out. It stays
    status:unverified until someone records evidence.

    Exit status: 0 written, 1 it is refused, and nothing changed, 2 wrong usage, 130 interrupted.
    """
    dataset_root()  # warns of code from elsewhere
    _report(*write_new(family, _values(axes), description))


def write_new(
    family: str, values: Mapping[str, int], description: str = ""
) -> tuple[Path, dict[str, Any], Report, list[Path]]:
    """Writes a Definition of a family at new sizes, proven against the oracle, into the dataset or the last root.

    Returns its path and JSON, what its verification says, and the other files that changed.

    Raises:
        AddError: it cannot be made, or is not proven; nothing changed.
    """
    from flashinfer_trace.dataset import sync as derived
    from flashinfer_trace.dataset.add import AddError, new_definition

    root = store.find_roots()[-1]
    data = new_definition(root, family, values, description)
    path = root / "definitions" / data["op_type"] / f"{data['name']}.json"
    report = _proven(Definition.from_dict(data, path))
    if report.status != "passed":
        raise AddError(f"{data['name']} is not written: its reference fails against the oracle; {report.message}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json_text(data))
    try:
        changed = derived.sync(root, write=True, names=[data["name"]])
    except BaseException:
        path.unlink(missing_ok=True)
        derived.sync_data_files(root, write=True)  # as they were without it
        raise
    return path, data, report, [one for one, _ in changed if one != path]


def _values(axes: Sequence[str]) -> dict[str, int]:
    values: dict[str, int] = {}
    for one in axes:
        axis, _, text = one.partition("=")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise click.UsageError(f"{one!r} is not of the form axis=value with a whole number")
        if int(text) > LARGEST_SIZE:
            raise click.UsageError(f"{axis} is {text}; sizes are at most {LARGEST_SIZE}")
        if values.setdefault(axis, int(text)) != int(text):
            raise click.UsageError(f"{axis} has two values; give one of them")
    return values


def _proven(definition: Definition) -> Report:
    """The report of verification against the oracle, if a kernel of the family's record takes these sizes."""
    with missing_packages():
        import torch

        from flashinfer_trace.sandbox.worker import reference_worker
    torch.set_num_threads(1)
    # Before harness and families are imported, because a fork of this process must not contain the oracles.
    with reference_worker("cpu", False) as worker:
        from flashinfer_trace.cli.runs import Settings, run_tasks
        from flashinfer_trace.cli.tasks import Task
        from flashinfer_trace.dataset.add import AddError
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
