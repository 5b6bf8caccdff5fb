"""flashinfer-trace dump, and files in place of names. torch and the families are imported when a command needs them."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashinfer_trace.cli.group import NOTHING_VERIFIED, echo_json
from flashinfer_trace.cli.options import counted, dataset_root, format_option, is_file, missing_packages
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.dumps import Dump, DumpError, Match, read_dump, read_dumps, versions
from flashinfer_trace.dataset.overlays import is_of_others, overlay_files
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.roots import find_overlays

if TYPE_CHECKING:
    from flashinfer_trace.harness.report import Report
    from flashinfer_trace.judging.dumped import Classified


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[DIR|FILE]...")
@click.option("--flashinfer", "version", metavar="VERSION", help="The release that wrote them [the newest known].")
@click.option("--add", is_flag=True, help="Write a Definition of each new size into the dataset, or the last --root.")
@format_option
def dump(paths: tuple[Path, ...], version: str | None, add: bool, output_format: str) -> None:
    """Say what each Definition is that FlashInfer dumped from a running program (FLASHINFER_TRACE_DUMP=1).

    same: the function of a Definition here, by its oracle; with the kernels, GPUs and versions that prove it. new size:
    a family here, at a size that the dataset lacks. another function: the name or the template of one here, but
    something differs, which the next lines say. unknown: nothing here is like it.

    A dumped reference runs in the sandbox, as references from pull requests do. Definitions of flashinfer-bench can be
    given as well. Without a DIR or FILE, those of each --root that has no Definitions of yours are read.

    Exit status: 0 done, 1 a file cannot be read or a size not be added, 2 wrong usage, 3 there is nothing that is known
    here, 130 interrupted.
    """
    dataset_root()
    version = version or versions()[-1]
    if not (paths := paths or tuple(find_overlays())):
        raise click.UsageError("name the directory of FLASHINFER_TRACE_DUMP_DIR, as DIR or as --root")
    found = read_dumps(paths)
    with missing_packages():
        import torch

        from flashinfer_trace.judging.dumped import UNKNOWN, classified
    torch.set_num_threads(1)
    results = []
    for one in classified(found, version):
        results.append(one)
        if output_format == "text":
            click.echo("\n".join(_lines(one)))
    added = _added(results) if add else {}
    if output_format == "json":
        echo_json(
            {"flashinfer": version, "dumps": [_json(one, added) for one in results], "summary": _summary(results)}
        )
    else:
        for path in added.values():
            click.echo(f"added {path}")
        click.echo(f"\n{_told(results)}")
    sys.exit(NOTHING_VERIFIED if all(one.kind == UNKNOWN for one in results) else 0)


def _lines(one: Classified) -> list[str]:
    """The printed lines of one dump: its class, and why."""
    from flashinfer_trace.judging.dumped import ANOTHER, NEW_SIZE, SAME, UNKNOWN

    match = one.match
    alike = one.kind == ANOTHER and match is not None and match.definition.name == one.dump.name
    head = f"{one.dump.name}: {'same name, ' if alike else ''}{one.kind}"
    if match is None or one.kind == UNKNOWN:
        resembled = [f"by its names it is {match.definition.name}"] if match else []
        return [f"{head}: {'; '.join([*resembled, *one.reasons])}"]
    if one.kind == ANOTHER:
        beside = "" if alike else f" than {match.definition.name}"
        return [f"{head}{beside}", *(f"  {reason}" for reason in _reasons(one))]
    lines = [f"{head}: {match.definition.name}"]
    if one.kind == SAME:
        lines += [f"  {run.kernel_label}, {run.library} {run.version} on {run.run.gpu}" for run in one.runs[:4]]
        lines += [f"  and {len(one.runs) - 4} more runs"] if len(one.runs) > 4 else []
        lines += ["  no kernel was run for it yet"] if not one.runs else []
    if one.kind == NEW_SIZE:
        lines.append(f"  of the family {match.family}: --add writes it")
    if match.untold:
        values = ", ".join(f"{axis}={value}" for axis, value in match.untold.items())
        lines.append(f"  for {values}, which the dump does not tell")
    if match.alias.silent:
        lines.append(f"  the dump does not tell {', '.join(match.alias.silent)}: its reference has them as here")
    return lines


def _reasons(one: Classified) -> list[str]:
    """The differences, and the case of each."""
    lines = list(one.reasons)
    failure = one.verdict.failure if one.verdict else None
    if failure is not None and failure.axes:
        lines[-1] += f"; axes {failure.axes}"
    if one.verdict is not None and one.verdict.right_on:
        lines.append(f"it is the same on {one.verdict.right_on}")
    return lines


def _json(one: Classified, added: dict[str, str]) -> dict[str, Any]:
    match = one.match
    return {
        "name": one.dump.name,
        "file": str(one.dump.definition.path or ""),
        "calls": one.dump.calls,
        "class": one.kind,
        "definition": match.definition.name if match else None,
        "family": match.family if match else None,
        "untold": dict(match.untold) if match else {},
        "silent": list(match.alias.silent) if match else [],
        "reasons": _reasons(one) if match else list(one.reasons),
        "failure": asdict(one.verdict.failure) if one.verdict and one.verdict.failure else None,
        "kernels": [
            {"kernel": run.kernel_label, "library": run.library, "version": run.version, "gpu": run.run.gpu}
            for run in one.runs
        ],
        "added": added.get(match.definition.name) if match else None,
    }


def _summary(results: Sequence[Classified]) -> dict[str, dict[str, int]]:
    from flashinfer_trace.judging.dumped import counts

    return {kind: {"dumps": number, "calls": calls} for kind, (number, calls) in counts(results).items()}


def _told(results: Sequence[Classified]) -> str:
    """How many dumps are what, and by share of calls, if they are counted."""
    calls = sum(one.dump.calls for one in results)
    parts = []
    for kind, each in _summary(results).items():
        if each["dumps"]:
            share = f" ({each['calls'] / calls:.0%} of the calls)" if calls else ""
            parts.append(f"{each['dumps']} {kind}{share}")
    return f"{counted(len(results), 'dump')}: {', '.join(parts)}"


def _added(results: Sequence[Classified]) -> dict[str, str]:
    """Writes a Definition of each new size; its files by name."""
    from flashinfer_trace.cli.maintenance import write_new
    from flashinfer_trace.judging.dumped import NEW_SIZE

    new = {one.match.definition.name: one.match for one in results if one.kind == NEW_SIZE and one.match}
    return {name: str(write_new(match.family, match.definition.const_axes)[0]) for name, match in new.items()}


def located(names: Sequence[str]) -> list[str]:
    """The names and globs; in place of a name that only an overlay has, its file. A glob means the files as well.

    Raises:
        DumpError: several overlays have a name.
    """
    if not find_overlays():
        return [*names]
    stems = [path.stem for path in store.definition_paths()]
    found: list[str] = []
    for name in names:
        ours, glob = fnmatch.filter(stems, name), any(sign in name for sign in "*?[")
        files = [] if is_file(name) or (ours and not glob) else overlay_files(name)
        if len(files) > 1 and not glob:
            raise DumpError(f"{name} is in several roots; name one of the files {', '.join(files)}")
        found += [name] if ours or not files else []
        found += files
    return found


def definition_named(text: str) -> Definition:
    """The Definition of this name, or in this file; of a dump, the one here that it is.

    Raises:
        DumpError: what was dumped is not a Definition here, and not a further size of a family; the message says why.
        DatasetError, InputError: see `store.load` and `Definition.from_file`.
    """
    text = located([text])[0]
    if not is_file(text):
        return store.load(text)
    path = Path(text)
    if not is_of_others(path):
        return Definition.from_file(path)
    with missing_packages():
        from flashinfer_trace.judging.dumped import NEW_SIZE, SAME, classified
    (found,) = classified([read_dump(path)], versions()[-1])
    if found.match is None or found.kind not in (SAME, NEW_SIZE):
        raise _no_definition(found)
    click.echo(f"{path} is {found.match.definition.name} here", err=True)
    return found.match.definition


def _no_definition(found: Classified) -> DumpError:
    return DumpError("\n".join([f"{found.dump.definition.path}: no Definition here computes it", *_lines(found)]))


def dumped_calls(files: Sequence[str]) -> list[tuple[Dump, Match]]:
    """The dumps in files, each with the Definition here that it is.

    Raises:
        UsageError: there are none.
        DumpError: one is not a Definition here; the message says why.
    """
    if not files:
        raise click.UsageError("name the dumps of the calls: the .json files of FLASHINFER_TRACE_DUMP_DIR")
    with missing_packages():
        from flashinfer_trace.judging.dumped import NEW_SIZE, SAME, classified
    calls = []
    for found in classified(read_dumps(map(Path, located(files))), versions()[-1]):
        if found.match is None or found.kind not in (SAME, NEW_SIZE):
            raise _no_definition(found)
        calls.append((found.dump, found.match))
    return calls


def dump_reports(paths: Sequence[Path]) -> list[Report]:
    """The reports of dumped references, each against the oracle of the Definition here that is closest."""
    from flashinfer_trace.harness.report import OutputSummary, Report
    from flashinfer_trace.judging.dumped import ANOTHER, UNKNOWN, classified

    reports = []
    for found in classified(map(read_dump, paths), versions()[-1]):
        verdict = found.verdict
        report = Report(found.dump.name, "oracle", "cpu", message="\n  ".join(_reasons(found)))
        report.status = {ANOTHER: "failed", UNKNOWN: "skipped"}.get(found.kind, "passed")
        if verdict is not None:
            report.cases, report.vacuous, report.corners = verdict.cases, verdict.vacuous, verdict.corners
            for name, figures in verdict.outputs.items():
                report.outputs[name] = OutputSummary(figures.policy, figures.worst, figures.error)
        reports.append(report)
    return reports
