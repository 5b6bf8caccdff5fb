"""Writes evidence: what a real kernel answered, on which GPU, for which hash of the reference (see `ledger`)."""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.files import write_json
from flashinfer_trace.harness.family import Kernel
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.ledger import REQUIRED_CASES, file_in, load_json

__all__ = ["record"]


def record(directory: Path, definition: Definition, kernel: Kernel, report: Report) -> Path:
    """Adds one passed run to the Definition's evidence, replacing an older run of that kernel on that GPU.

    Entries for another hash of the reference are dropped: they prove nothing about this one. The file is replaced
    as a whole, under a lock, so that parallel workers lose nothing and a reader never sees half of it.

    Raises:
        ValueError: the report did not pass, did not run on a GPU, or has too few real cases: that is no evidence.
        LedgerError: older evidence of the Definition lies there and cannot be read.
    """
    if report.status != "passed" or not report.device.startswith("cuda"):
        raise ValueError(f"{definition.name}: a run that {report.status} on {report.device} is not evidence")
    if report.cases < REQUIRED_CASES:
        raise ValueError(
            f"{definition.name}: {report.cases} real cases are not evidence; it takes {REQUIRED_CASES} or more"
        )
    path = file_in(directory, definition.op_type, definition.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = _entry(kernel, report)
    with _locked(path):
        old = load_json(path) if path.exists() else {}
        same_reference = old.get("reference_sha256") == definition.reference_sha256
        kept = [e for e in old.get("entries", []) if same_reference and _key(e) != _key(entry)]
        document = {
            "definition": definition.name,
            "op_type": definition.op_type,
            "reference_sha256": definition.reference_sha256,
            "entries": sorted([*kept, entry], key=_key),
        }
        write_json(path, document)
    return path


def _entry(kernel: Kernel, report: Report) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.device(report.device))
    return {
        "kernel": {
            "library": kernel.library,
            "version": importlib.metadata.version(kernel.library),
            "path": kernel.path,
            "variant": kernel.variant,
        },
        "gpu": {"name": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"},
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cases": report.cases,
        "vacuous": report.vacuous,
        "seed": report.seed,
        "result": report.status,
        "outputs": {
            name: {
                "policy": summary.policy,
                **{figure: float(f"{getattr(summary, figure):.4g}") for figure in FIGURES},
            }
            for name, summary in report.outputs.items()
        },
        "recorded_at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


FIGURES = ("kernel_worst", "reference_worst", "kernel_error", "reference_error")


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    kernel, gpu = entry["kernel"], entry["gpu"]
    return (kernel["path"], kernel["variant"], kernel["library"], gpu["name"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the directory that `path` lies in (released when its descriptor is closed)."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
