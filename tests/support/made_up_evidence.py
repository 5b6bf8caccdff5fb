"""Made-up evidence for tests of code that reads evidence; it matches the Definition and its family's record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from flashinfer_trace.dataset import digests
from flashinfer_trace.dataset import evidence as ledger
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import write_json
from flashinfer_trace.kernels.table import KernelFacts

__all__ = ["made_up_evidence", "small_dataset"]

FIGURES = {"kernel_worst": 0.9, "reference_worst": 0.8, "kernel_error": 0.002, "reference_error": 0.001}


def made_up_evidence(
    root: Path, definition: Definition, capability: tuple[int, int] = ledger.RECORDED_ON
) -> dict[str, Any]:
    """The content of an evidence file of every kernel that a GPU of this compute capability runs.

    At `ledger.RECORDED_ON` it proves `definition` in the dataset at `root`.
    """
    kernels = ledger.kernels_today(root, definition)
    runnable = [kernel for kernel in kernels.values() if kernel.runs_on(capability)]
    return {
        "definition": definition.name,
        "op_type": definition.op_type,
        "entries": [_entry(root, definition, kernel, capability) for kernel in runnable],
    }


def small_dataset(root: Path, source: Path, *names: str, capability: tuple[int, int] = ledger.RECORDED_ON) -> Path:
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
        target.write_text(text.replace(ledger.UNVERIFIED, ledger.VERIFIED), encoding="utf-8")
        definition = Definition.from_file(target)
        evidence = ledger.evidence_path(root, definition)
        evidence.parent.mkdir(parents=True, exist_ok=True)
        write_json(evidence, made_up_evidence(root, definition, capability))
    return root


def _keep_families(root: Path, op_types: set[str]) -> None:
    """Removes the families of all other op_types from the naming conventions."""
    path = root / "schema" / "naming.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: entry for name, entry in document["families"].items() if entry["op_type"] in op_types}
    write_json(path, {**document, "families": kept})


def _entry(root: Path, definition: Definition, kernel: KernelFacts, capability: tuple[int, int]) -> dict[str, Any]:
    return {
        "kernel": {
            "label": kernel.label,
            "library": kernel.library,
            "version": "2.11.0",
            "path": kernel.path,
            "variant": kernel.variant,
        },
        "digests": {
            "reference": definition.reference_sha256,
            "contract": digests.contract_sha256(definition),
            **ledger.code_today(definition)[kernel.label],
        },
        "environment": {
            "gpu": {"name": "Test GPU", "compute_capability": ".".join(map(str, capability))},
            "python": "3.12.3",
            "torch": "2.11.0",
            "cuda": "13.0",
            "libraries": {"triton": "3.6.0", kernel.library: "2.11.0"},
        },
        "cases": 57,
        "vacuous": 60,
        "seed": 0,
        "result": "passed",
        "outputs": {name: {"policy": "made up", **FIGURES} for name in definition.outputs},
        "recorded_at": "2026-11-22T03:04:05Z",
    }
