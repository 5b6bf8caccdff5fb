"""flashinfer-trace validate and embed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flashinfer_trace.cli import completion
from flashinfer_trace.cli.group import FAILED, echo_json, echo_json_text
from flashinfer_trace.cli.options import counted, dataset_root, format_option, matching_names

__all__ = ["embed", "validate"]

#: Directories of JSON files that are neither Definitions nor evidence, what they have, and what checks it.
OTHER_FILES = (
    ("models", "the constants of a model", "pytest tests/test_models.py"),
    ("workloads", "recorded traffic", "pytest tests/traffic"),
)


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--release", is_flag=True, help="Also report evidence that older harness or family code judged.")
@format_option
def validate(paths: tuple[Path, ...], release: bool, output_format: str) -> None:
    """Check Definitions (files or directories; default: the whole dataset) against the schema and conventions.

    Exit status: 0 clean, 1 problems, 2 wrong usage, 130 interrupted.
    """
    from flashinfer_trace.validation import format_json, format_text, validate_paths

    root = dataset_root()
    missing = [path for path in paths if not path.exists() and not path.is_symlink()]
    if missing:
        raise click.UsageError(f"no such file or directory: {missing[0]}")
    for path in paths:
        _refuse_other_files(path, root)
    result = validate_paths(list(paths) or [root], root, release=release)
    if output_format == "json":
        echo_json_text(format_json(result))
    else:
        if result.problems:
            click.echo(format_text(result))
        verdict = counted(len(result.problems), "problem") if result.problems else "no problems"
        if paths and not result.checked:
            what = "no Definition among these files; what they say was checked"
            click.echo(f"{what}, {verdict}; `flashinfer-trace validate` checks the dataset, {root}")
        else:
            click.echo(f"{counted(result.checked, 'Definition')} checked, {verdict}; dataset: {root}")
    sys.exit(FAILED if result.problems else 0)


def _refuse_other_files(path: Path, root: Path) -> None:
    """Raises a usage error for a file of the dataset that is of another kind, with what checks that."""
    try:
        directory = path.resolve().relative_to(root.resolve()).parts[:1]
    except (ValueError, OSError, RuntimeError):  # the last before Python 3.13, for a link that leads to itself
        return
    for name, what, check in OTHER_FILES:
        if directory == (name,):
            raise click.UsageError(f"{path} is not a Definition but {what}; in a checkout, `{check}` checks it")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME|GLOB]...", shell_complete=completion.names)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a Definition is out of date.")
@format_option
def embed(names: tuple[str, ...], check: bool, output_format: str) -> None:
    """Bring Definitions (names or globs; default: all) in line with reference/, evidence/ and models/.

    Writes each family's reference into its Definitions, sets status:verified where evidence/ proves exactly that
    reference, status:unverified elsewhere, and the other tags as they follow from models/.

    Exit status: 0 done, 1 a file cannot be embedded or, with --check, is out of date, 2 wrong usage, 130 interrupted.
    """
    from flashinfer_trace.embedding import embed_all

    root = dataset_root()
    changed = embed_all(root, write=not check, names=matching_names(names, root) if names else ())
    if output_format == "json":
        files = [{"file": path.relative_to(root).as_posix(), "change": what} for path, what in changed]
        echo_json({"root": str(root), "written": not check, "changed": files})
    else:
        for path, what in changed:
            click.echo(f"{path}: {what} {'is out of date; run `flashinfer-trace embed`' if check else 'updated'}")
        click.echo(f"{counted(len(changed), 'Definition')} {'out of date' if check else 'updated'}; dataset: {root}")
    sys.exit(FAILED if check and changed else 0)
