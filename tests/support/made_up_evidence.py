"""Made-up evidence for tests of code that reads evidence; it matches the Definition and its family's record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import digests
from flashinfer_trace.dataset import evidence as proof
from flashinfer_trace.dataset.evidence_run import fields_of, line_of, run_name
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import json_line, write_json, write_text
from flashinfer_trace.kernels import library_of
from flashinfer_trace.kernels.table import RECORDED

Json = dict[str, Any]
FIGURES = [0.9, 0.8, 0.002, 0.001]


def write_evidence(root: Path, definition: Definition, capability: tuple[int, int] = proof.RECORDED_ON) -> Path:
    """Writes evidence of every kernel that a GPU of this compute capability runs, and the header of its run.

    At `proof.RECORDED_ON` it proves `definition` in the dataset at `root`.
    """
    kernels = proof.kernels_today(root, definition)
    runnable = [kernel for kernel in kernels.values() if kernel.runs_on(capability)]
    code = proof.code_today(definition)
    header = {
        "started_at": "2026-11-22T03:04:05Z",
        "gpu": {"name": "Test GPU", "compute_capability": ".".join(map(str, capability))},
        "python": "3.12.3",
        "torch": f"{RECORDED['torch']}+cu130",
        "cuda": "13.0",
        "libraries": {**RECORDED, "triton": "3.6.0"},
        "seed": 0,
        "harness": next(iter(code.values()), {"harness": "0" * 12})["harness"],
    }
    path = proof.evidence_path(root, definition)
    run = write_run(path.parent.parent, header)
    lines = []
    for kernel in runnable:
        named = {} if library_of(kernel.path, RECORDED) == kernel.library else {"library": kernel.library}
        line = {
            "kernel": kernel.label,
            "run": run,
            **named,
            "definition": digests.short(digests.definition_sha256(definition)),
            **{part: one for part, one in code[kernel.label].items() if part != "harness"},
            "drawn": "0" * 12,
            "cases": 57,
            "vacuous": 60,
            "outputs": dict.fromkeys(definition.outputs, FIGURES),
        }
        lines.append(line)
    write_lines(path, lines)
    return path


def write_run(evidence: Path, header: Json) -> str:
    """Writes the header of a run into a directory of evidence, and returns the name of the run."""
    path = proof.run_file(evidence, run_name(header))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, header)
    return path.stem


def read_lines(path: Path) -> list[Json]:
    """The fields of the lines of an evidence file."""
    return [fields_of(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, lines: list[Json]) -> None:
    """Writes an evidence file with lines that have these fields."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(json_line(line_of(line)) for line in lines))


def change_lines(path: Path, change: Callable[[list[Json]], object]) -> None:
    """Changes the lines of an evidence file."""
    lines = read_lines(path)
    change(lines)
    path.write_text("".join(json.dumps(line_of(line)) + "\n" for line in lines), encoding="utf-8")  # a NaN too


def change_run(path: Path, change: Callable[[Json], object]) -> None:
    """Makes the first line of an evidence file one of a run whose header differs, and has the name that fits it."""
    evidence = path.parent.parent

    def point(lines: list[Json]) -> None:
        header = json.loads(proof.run_file(evidence, lines[0]["run"]).read_text(encoding="utf-8"))
        change(header)
        lines[0]["run"] = write_run(evidence, header)

    change_lines(path, point)


def small_dataset(root: Path, source: Path, *names: str, capability: tuple[int, int] = proof.RECORDED_ON) -> Path:
    """Creates a dataset at `root` with some Definitions of `source`, all tagged verified, with made-up evidence.

    It has the families of their op_types only: what reads the dataset a hundred times reads little.
    """
    paths = [path for name in names for path in source.glob(f"definitions/*/{name}.json")]
    op_types = {path.parent.name for path in paths}
    shutil.copytree(source / "schema", root / "schema", ignore=shutil.ignore_patterns("tests"))
    _keep_families(root, op_types)
    for op_type in op_types:
        shutil.copytree(source / "reference" / op_type, root / "reference" / op_type)
    for path in paths:
        target = root / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        target.write_text(text.replace(proof.UNVERIFIED, proof.VERIFIED), encoding="utf-8")
        write_evidence(root, Definition.from_file(target), capability)
    return root


def _keep_families(root: Path, op_types: set[str]) -> None:
    """Removes the families of all other op_types from the naming conventions."""
    path = root / "schema" / "naming.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: entry for name, entry in document["families"].items() if entry["op_type"] in op_types}
    write_json(path, {**document, "families": kept})
