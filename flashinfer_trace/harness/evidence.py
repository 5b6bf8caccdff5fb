"""Writes evidence: what a real kernel answered, on which GPU, for which reference and contract (see `ledger`)."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset import digests
from flashinfer_trace.dataset.evidence import REQUIRED_CASES, TIME_FORMAT, family_today, file_in, load_json
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import write_json
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import Kernel
from flashinfer_trace.harness.verify import Report

__all__ = ["add", "entry_of", "record"]


def record(directory: Path, definition: Definition, kernel: Kernel, report: Report) -> Path:
    """Adds one passed run to the Definition's evidence: see `entry_of` and `add`."""
    return add(directory, definition, entry_of(definition, kernel, report))


def entry_of(definition: Definition, kernel: Kernel, report: Report) -> dict[str, Any]:
    """The entry for a run that passed on a GPU of this machine.

    Raises:
        ValueError: the report did not pass, did not run on a GPU, or has too few real cases: that is no evidence.
        LookupError: no family has the Definition.
    """
    if report.status != "passed" or not report.device.startswith("cuda"):
        raise ValueError(f"{definition.name}: a run that {report.status} on {report.device} is not evidence")
    if report.cases < REQUIRED_CASES:
        raise ValueError(
            f"{definition.name}: {report.cases} real cases are not evidence; it takes {REQUIRED_CASES} or more"
        )
    return _entry(definition, kernel, report)


def add(directory: Path, definition: Definition, entry: dict[str, Any]) -> Path:
    """Adds an entry to the Definition's evidence, replacing an older run of that kernel on that GPU.

    Entries for another reference or contract are dropped: they prove nothing about this one. The file is replaced
    as a whole, under a lock, so that parallel workers lose nothing and a reader never sees half of it.

    Raises:
        LedgerError: older evidence of the Definition lies there and cannot be read.
    """
    path = file_in(directory, definition.op_type, definition.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        old = load_json(path) if path.exists() else {}
        binding = _binding(entry)
        kept = [e for e in old.get("entries", []) if _binding(e) == binding and _key(e) != _key(entry)]
        document = {
            "definition": definition.name,
            "op_type": definition.op_type,
            "entries": sorted([*kept, entry], key=_key),
        }
        write_json(path, document)
    return path


def _entry(definition: Definition, kernel: Kernel, report: Report) -> dict[str, Any]:
    return {
        "kernel": {
            "label": kernel.label,
            "library": kernel.library,
            "version": importlib.metadata.version(kernel.library),
            "path": kernel.path,
            "variant": kernel.variant,
        },
        "digests": {
            "reference": definition.reference_sha256,
            "contract": digests.contract_sha256(definition),
            **judging_code(family_today(definition), kernel),
        },
        "environment": _environment(report.device, kernel.library),
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
        "recorded_at": datetime.datetime.now(datetime.timezone.utc).strftime(TIME_FORMAT),
    }


def _environment(device: str, library: str) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.device(device))
    driver = _driver()
    versions = {name: _version(name) for name in sorted({*LIBRARIES, library})}
    return {
        "gpu": {"name": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"},
        **({"driver": driver} if driver else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "libraries": {name: version for name, version in versions.items() if version is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of the NVIDIA driver as the kernel module tells it, None where it does not (torch has no call for it)."""
    with contextlib.suppress(OSError):
        found = re.search(r"Module\s+(?:for \S+\s+)?([0-9][0-9.]*)", DRIVER_VERSION.read_text(encoding="utf-8"))
        return found.group(1) if found else None
    return None


#: Where the NVIDIA driver for Linux tells its version.
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
#: Distributions that take part in a run besides torch: kernels, what compiles some of them, and what draws the cases.
LIBRARIES = ("flashinfer-python", "hypothesis", "sglang-kernel", "triton")
FIGURES = ("kernel_worst", "reference_worst", "kernel_error", "reference_error")


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    kernel = entry["kernel"]
    return (kernel["path"], kernel["variant"], kernel["library"], entry["environment"]["gpu"]["name"])


def _binding(entry: dict[str, Any]) -> tuple[str, str] | None:
    """What an entry is evidence of; None for one in another form, which is of nothing here."""
    found = entry.get("digests", {})
    return (found["reference"], found["contract"]) if {"reference", "contract"} <= set(found) else None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the directory that `path` lies in (released when its descriptor is closed)."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
