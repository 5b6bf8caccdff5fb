"""Writes evidence: what a real kernel answered, on which GPU, for which reference and contract (`dataset.evidence`)."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.dataset import digests
from flashinfer_trace.dataset.evidence import (
    REQUIRED_CASES,
    TIME_FORMAT,
    entries_of,
    family_today,
    file_in,
    load_lines,
    run_file,
)
from flashinfer_trace.dataset.evidence_run import FIGURES, Entry, line_of, run_name
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import json_line, write_json, write_text
from flashinfer_trace.harness.binding import judging_code
from flashinfer_trace.harness.family import Kernel
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.kernels import distributions, library_of


def record(directory: Path, definition: Definition, kernel: Kernel, report: Report) -> Path:
    """Adds one passed run to the Definition's evidence: see `entry_of` and `add`."""
    return add(directory, definition, entry_of(definition, kernel, report))


def entry_of(definition: Definition, kernel: Kernel, report: Report) -> dict[str, Any]:
    """The line for a run that passed on a GPU of this machine, and the header of the run but for when it began.

    Raises:
        ValueError: the report did not pass, did not run on a GPU, or has too few real cases. It is not evidence.
        LookupError: no family has the Definition.
    """
    if report.status != "passed" or not report.device.startswith("cuda"):
        raise ValueError(f"{definition.name}: a run that {report.status} on {report.device} is not evidence")
    if report.cases < REQUIRED_CASES:
        raise ValueError(
            f"{definition.name}: {report.cases} real cases are not evidence; it takes {REQUIRED_CASES} or more"
        )
    return _entry(definition, kernel, report)


def add(directory: Path, definition: Definition, recorded: Mapping[str, Any]) -> Path:
    """Adds a line to the Definition's evidence, replacing an older run of that kernel on that GPU.

    It also replaces runs on other GPUs that other code judged, or that are of another release: they are stale. Lines
    for another reference or contract are dropped: they prove nothing about this one. The file is replaced as a whole,
    under a lock: parallel workers lose nothing, and a reader never sees half of it. A line that is recorded
    again, and has not changed, differs in the name of its run alone.

    Args:
        directory: of evidence.
        definition: whose evidence it is.
        recorded: what `entry_of` gives.

    Raises:
        EvidenceError: older evidence of the Definition lies there and cannot be read.
    """
    header = {"started_at": started_at(), **recorded["run"]}
    run, path = run_name(header), file_in(directory, definition.op_type, definition.name)
    for one in (path, run_file(directory, run)):
        one.parent.mkdir(parents=True, exist_ok=True)
    if not run_file(directory, run).exists():  # of the same content whichever worker writes it
        write_json(run_file(directory, run), header)
    line = line_of({**recorded["line"], "run": run})
    with _locked(path):
        older = load_lines(path) if path.exists() else ()  # not from a cache: another worker may just have written it
        every = list(zip(entries_of(path, [*older, line]), [*older, line], strict=True))
        newest = every[-1][0]
        known = {(entry.kernel_label, entry.run.gpu): one for entry, one in every if _counts_beside(entry, newest)}
        write_text(path, "".join(json_line(known[key]) for key in sorted(known)))
    return path


def _counts_beside(entry: Entry, newest: Entry) -> bool:
    """Whether an entry still says something once another one is there: see `add`."""
    if entry.digests["definition"] != newest.digests["definition"]:
        return False
    judged, judged_now = ((one.version, one.digests["harness"], one.digests["family"]) for one in (entry, newest))
    return entry.kernel_label != newest.kernel_label or judged == judged_now


def started_at() -> str:
    """When this recording began, UTC: the same for the processes that this one starts from now on."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime(TIME_FORMAT)
    return os.environ.setdefault("FLASHINFER_TRACE_RECORDING_STARTED", now)


def _entry(definition: Definition, kernel: Kernel, report: Report) -> dict[str, Any]:
    code = {part: digests.short(one) for part, one in judging_code(family_today(definition), kernel).items()}
    header = _header(report, kernel.library) | {"harness": code.pop("harness")}
    named = {} if library_of(kernel.path, header["libraries"]) == kernel.library else {"library": kernel.library}
    line = {
        "kernel": kernel.label,
        **named,
        "definition": digests.short(digests.definition_sha256(definition)),
        **code,
        "drawn": digests.short(report.plans.sha256),
        "cases": report.cases,
        **({"rounds": report.plans.counts} if len(report.plans.counts) > 1 else {}),
        **({"vacuous_cases": report.plans.vacuous} if report.plans.vacuous else {}),
        "outputs": {
            name: [float(f"{getattr(summary, figure):.3g}") for figure in FIGURES]
            for name, summary in report.outputs.items()
        },
    }
    return {"run": header, "line": line}


def _header(report: Report, library: str) -> dict[str, Any]:
    """The header of a run, without its start time and the code."""
    properties = torch.cuda.get_device_properties(torch.device(report.device))
    driver = _driver()
    versions = {name: _version(name) for name in sorted({*LIBRARIES, *distributions(), library})}
    return {
        "gpu": {"name": properties.name, "compute_capability": f"{properties.major}.{properties.minor}"},
        **({"driver": driver} if driver else {}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "libraries": {name: version for name, version in versions.items() if version is not None},
        "seed": report.seed,
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
#: Distributions that take part in a run besides those with kernels: what compiles some, and what draws the cases.
LIBRARIES = ("hypothesis", "triton")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the directory of `path` (released when its descriptor is closed)."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
