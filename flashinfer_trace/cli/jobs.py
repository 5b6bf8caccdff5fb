"""What a run of `verify` consists of: each chosen Definition against its oracle and kernels. Imports torch."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from flashinfer_trace import dataset
from flashinfer_trace.cli.reports import error_line
from flashinfer_trace.definition import Definition
from flashinfer_trace.embedding import current_reference
from flashinfer_trace.families import family_of
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.naming import load_naming

__all__ = ["Job", "find_jobs", "select"]


@dataclass(frozen=True)
class Job:
    """One Definition against one target.

    Attributes:
        definition: as loaded.
        family: its record; None if there is no usable one.
        target: ``oracle``, or the kernel's label.
        kernel: the kernel it is compared with; None for the oracle.
        broken: why it cannot be run, with the file and the fix; empty if it can.
        stale: that its embedded reference is older than the source, with the fix; empty if it is not.
    """

    definition: Definition
    family: Family | None
    target: str
    kernel: Kernel | None = None
    broken: str = ""
    stale: str = ""

    @property
    def record(self) -> Family:
        """The family's record of a job that is not broken."""
        assert self.family is not None, f"{self.definition.name}: a broken job is not run"
        return self.family

    def impossible(self, device: str) -> Report | None:
        """A failed report of a broken job, a skipped one if the kernel cannot run on this device, or None."""
        report = Report(self.definition.name, self.target, device)
        if self.broken:
            report.status, report.message = "failed", self.broken
            return report
        if self.kernel is None:
            return None
        if torch.device(device).type != "cuda":
            reason: str | None = "kernels need --device cuda"
        else:
            reason = self.kernel.unavailable(torch.cuda.get_device_capability(device))
        if reason is None:
            return None
        report.status, report.message = "skipped", reason
        return report


def select(names: Sequence[str], root: Path) -> list[Definition]:
    """Definitions by name or glob; a word that matches nothing is a usage error."""
    stems = [path.stem for path in dataset.definition_paths(root)]
    chosen = [] if names else stems
    for pattern in names:
        matches = fnmatch.filter(stems, pattern)
        if not matches and any(character in pattern for character in "*?["):
            raise click.UsageError(f"no Definition matches {pattern!r}; `flashinfer-trace list` shows all names")
        chosen += matches or [pattern]
    return [dataset.load(name, root) for name in dict.fromkeys(chosen)]


def find_jobs(definitions: Sequence[Definition], root: Path, against: str, kernel_label: str | None) -> list[Job]:
    """The jobs of these Definitions, in their order.

    Raises:
        UsageError: none of them has the kernel that was asked for.
    """
    jobs = [job for definition in definitions for job in _jobs_of(definition, root, against, kernel_label)]
    if kernel_label and not jobs:
        labels = dict.fromkeys(kernel.label for each in definitions for kernel in family_of(each).kernels_of(each))
        one = len(definitions) == 1
        hint = (
            dataset.closest(kernel_label, labels) or f"{'it has' if one else 'they have'} {', '.join(labels) or 'none'}"
        )
        who = f"{definitions[0].name} has" if one else "the chosen Definitions have"
        raise click.UsageError(f"{who} no kernel {kernel_label!r}; {hint}")
    return jobs


def _jobs_of(definition: Definition, root: Path, against: str, kernel_label: str | None) -> list[Job]:
    target = kernel_label or ("kernel" if against == "kernel" else "oracle")
    try:
        family = family_of(definition)
        broken, stale = unfinished(family), staleness(definition, root)
    except Exception as error:  # a family module is Python that a contributor writes
        return [Job(definition, None, target, broken=error_line(error, definition))]
    if broken:
        return [Job(definition, family, target, broken=broken)]
    jobs = []
    if against in ("oracle", "all"):
        jobs.append(Job(definition, family, "oracle", stale=stale))
    if against in ("kernel", "all"):
        kernels = [
            kernel for kernel in family.kernels_of(definition) if kernel_label in (None, kernel.label, kernel.path)
        ]
        jobs += [Job(definition, family, kernel.label, kernel, stale=stale) for kernel in kernels]
    return jobs


def staleness(definition: Definition, root: Path) -> str:
    """That the embedded reference is not what reference/ renders today, with the fix; empty if it is."""
    if current_reference(definition, root, load_naming(root)) == definition.reference:
        return ""
    return (
        f"the embedded reference is older than its source in {root / 'reference' / definition.op_type}; "
        f"run `flashinfer-trace embed {definition.name}`"
    )


def unfinished(family: Family) -> str:
    """The first TODO that a scaffold left in the module of a family's record; empty if there is none."""
    for path in _source_files(family):
        todo = _first_todo(path)
        if todo:
            return (
                f"{todo}; the harness record of {family.name} is unfinished: write it "
                f"(`flashinfer-trace validate` lists every TODO)"
            )
    return ""


@functools.cache
def _first_todo(path: Path) -> str:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if b"TODO" in line:
            return f"{path}:{number}: {line.decode(errors='replace').strip()}"
    return ""


def _source_files(family: Family) -> Iterator[Path]:
    for function in (family.plans, family.plan_for_axes, family.make_inputs, family.oracle):
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
        if code is not None:
            yield Path(code.co_filename)
