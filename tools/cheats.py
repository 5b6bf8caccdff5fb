"""The part of docs/judge.md about cheating kernels: what each does, and what two judges say of it."""

from __future__ import annotations

import ast
import json
import runpy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashinfer_trace import DatasetError, load
from flashinfer_trace.families import all_families
from flashinfer_trace.files import read_text
from tools.shared.markdown import code, table

__all__ = ["CHEATS", "END", "START", "cheats_document", "section"]

START = "<!-- From here on written by `python -m tools.generate_docs`; do not edit. -->"
END = "<!-- Up to here written by `python -m tools.generate_docs`. -->"

#: The cheats, what `pytest --record-verdicts` writes, and what compare_with_flashinfer_bench.py writes.
CHEATS = Path("tests/support/cheating_kernels.py")
VERDICTS = Path("tests/judging/verdicts.json")
THEIRS = Path("tests/judging/flashinfer_bench.json")

Verdicts = Mapping[str, Any]


def cheats_document(root: Path) -> dict[Path, str]:
    """docs/judge.md with the generated part written anew, by path; nothing of a dataset without the judge's tests.

    Raises:
        DatasetError: it lacks the two lines between which that part is.
    """
    if not (root / CHEATS).exists():
        return {}
    path = root / "docs" / "judge.md"
    before, start, rest = read_text(path).partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise DatasetError(f"{path}: lacks the lines {START!r} and {END!r}; restore them from version control")
    ours = json.loads(read_text(root / VERDICTS)) if (root / VERDICTS).exists() else None
    cheats = runpy.run_path(str(root / CHEATS))["ALL"]
    return {path: f"{before}{START}\n\n{section(cheats, ours, json.loads(read_text(root / THEIRS)))}\n{END}{after}"}


def section(cheats: Sequence[Any], ours: Verdicts | None, theirs: Mapping[str, Verdicts]) -> str:
    """The generated part.

    Args:
        cheats: the table of tests/support/cheating_kernels.py.
        ours: what tests/judging/verdicts.json holds; None without that file.
        theirs: flashinfer-bench's verdicts, by device (cpu or cuda).
    """
    of_judge = ["No run on a GPU is recorded yet. This command writes the file that is missing:", *_command()]
    headings, found = ["Kernel", "What it does", "Found as", "flashinfer-bench"], {}
    if ours is not None:
        of_judge = _recorded(cheats, ours)
        headings.insert(3, f"On an {ours['environment']['gpu']}")
        found = {line["name"]: line for line in ours["verdicts"] if line["kind"] == "cheats"}
    rows = []
    for cheat in cheats:
        kinds = " or ".join(map(code, cheat.kinds))
        on_a_gpu = [] if ours is None else [_on_a_gpu(cheat, found.get(cheat.function))]
        rows.append([code(cheat.function), _docstring(cheat), kinds, *on_a_gpu, _status(cheat, theirs)])
    return "\n".join([*of_judge, "", *_asked(theirs), "", *table(headings, rows), ""])


def _command() -> list[str]:
    return ["", "```bash", f"pytest -m gpu_harness tests/judging --record-verdicts={VERDICTS}", "```"]


def _recorded(cheats: Sequence[Any], ours: Verdicts) -> list[str]:
    """How many kernels were judged on the GPU, and which verdicts are not as they should be."""
    lines = {kind: [one for one in ours["verdicts"] if one["kind"] == kind] for kind in ("cheats", "honest", "kernels")}
    expected = {cheat.function: cheat.kinds for cheat in cheats if cheat.gpu}
    rejected = sum(_rejected(one, expected.get(one["name"], ())) for one in lines["cheats"])
    passed = {kind: sum(_passed(one) for one in lines[kind]) for kind in ("honest", "kernels")}
    major, _, minor = ours["environment"]["capability"].partition(".")
    every = [kernel for family in all_families() for kernel in family.kernels]
    elsewhere = sum(kernel.unavailable((int(major), int(minor))) is not None for kernel in every)
    unjudged = len(every) - elsewhere - sum(one["grade"] != "not judged" for one in lines["kernels"])
    later = len(expected.keys() - {one["name"] for one in lines["cheats"]})
    text = (
        f"On an {_machine(ours)}, the judge rejected {rejected} of {len(expected)} cheats for the right reason"
        f"{f' ({later} not run there yet)' * bool(later)}. It passed {passed['honest']} of {len(lines['honest'])} "
        f"honest kernels beside them, and {passed['kernels']} of {len(lines['kernels'])} real ones, each for one "
        f"Definition of its family. Of all {len(every)} real kernels, {elsewhere} need another GPU; not judged: "
        f"{unjudged}."
    )
    wrong = [one for one in [*lines["honest"], *lines["kernels"]] if not _passed(one)]
    listed = [f"- {code(one['name'])} for {code(one['definition'])}: {_grade(one)}" for one in wrong]
    defects = "[kernel_findings.md](kernel_findings.md) has the defects of real kernels"
    waiting = "; what was not judged waits for another run" * bool(unjudged)
    explained = ["", f"Not passed ({defects}{waiting}):", ""]
    return [text, *(explained if listed else []), *listed]


def _rejected(line: Mapping[str, Any], kinds: Iterable[str]) -> bool:
    return line["grade"] == "wrong" and line["failure"] in kinds


def _passed(line: Mapping[str, Any]) -> bool:
    return line["grade"] in ("reference-grade", "kernel-grade")


def _grade(line: Mapping[str, Any]) -> str:
    return f"{line['grade']}: {code(line['failure'])}" if "failure" in line else str(line["grade"])


def _on_a_gpu(cheat: Any, line: Mapping[str, Any] | None) -> str:
    if not cheat.gpu:
        return "cheats on a CPU only"
    return "not recorded" if line is None else _grade(line)


def _machine(run: Verdicts) -> str:
    """A machine with its software, and the date."""
    known = dict(run["environment"])
    name = known.pop("gpu", None) or f"{known.pop('processor')} CPU"
    return f"{name} with torch {known['torch']} on {run['date']}"


def _asked(theirs: Mapping[str, Verdicts]) -> list[str]:
    """On what flashinfer-bench's verdicts were taken."""
    cpu, gpu = theirs["cpu"], theirs.get("cuda")
    text = f"The verdicts of flashinfer-bench {cpu['flashinfer_bench']} are from an {_machine(cpu)}"
    if gpu is None:
        return [f"{text}. Those that it can judge only on a GPU were not run yet."]
    return [f"{text}; those marked with *GPU*, of version {gpu['flashinfer_bench']}, from an {_machine(gpu)}."]


def _status(cheat: Any, theirs: Mapping[str, Verdicts]) -> str:
    """What flashinfer-bench says of a kernel, or why it says nothing."""
    for device, mark in (("cpu", ""), ("cuda", " *GPU*")):
        if said := theirs.get(device, {}).get("verdicts", {}).get(cheat.function):
            return code(said) + mark
    dtypes = {one.dtype for one in load(cheat.definition).outputs.values()}
    unread = sorted(one for one in dtypes if one.startswith("float8"))
    return f"cannot compare {' and '.join(unread)}" if unread else "not run"


def _docstring(cheat: Any) -> str:
    tree = ast.parse(read_text(Path(cheat.path.rpartition(":")[0])))
    (function,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == cheat.function)
    return str(ast.get_docstring(function))
