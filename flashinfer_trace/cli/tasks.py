"""The tasks of a run of `verify`: each chosen Definition against its oracle and kernels. Imports torch."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from flashinfer_trace import families
from flashinfer_trace.cli.group import is_ours
from flashinfer_trace.dataset import store
from flashinfer_trace.dataset.sync import outdated_reference
from flashinfer_trace.families import family_of
from flashinfer_trace.format.definition import Definition
from flashinfer_trace.harness.family import Family, Kernel
from flashinfer_trace.harness.verify import Report
from flashinfer_trace.kernels.names import kernels_named, no_kernel_named


@dataclass(frozen=True)
class Task:
    """One Definition against one target.

    Attributes:
        definition: as loaded.
        family: its record; None if none is usable.
        target: ``oracle``, or the kernel's label.
        kernel: the kernel it is compared with; None for the oracle.
        broken: why it cannot be run, with the file and the fix; empty if it can.
        stale: a message with the fix if its embedded reference is older than the source; empty if it is not.
    """

    definition: Definition
    family: Family | None
    target: str
    kernel: Kernel | None = None
    broken: str = ""
    stale: str = ""

    @property
    def record(self) -> Family:
        """The family's record of a task that is not broken."""
        assert self.family is not None, f"{self.definition.name}: a broken task must not be run"
        return self.family

    def impossible(self, device: str) -> Report | None:
        """A failed report for a broken task; a skipped one if the kernel cannot run on this device, or if its library
        is optional and missing; or None."""
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
        reason = reason or self.kernel.known.skipped()
        if reason is None:
            return None
        report.status, report.message = "skipped", reason
        return report


def find_tasks(definitions: Sequence[Definition], root: Path, against: str, kernel_label: str | None) -> list[Task]:
    """The tasks of these Definitions, in the same order.

    Raises:
        UsageError: none of them has the requested kernel.
    """
    tasks = [task for definition in definitions for task in _tasks_of(definition, root, against, kernel_label)]
    if kernel_label and not tasks:
        kernels = [kernel for each in definitions for kernel in family_of(each).kernels_of(each)]
        who = f"{definitions[0].name} has" if len(definitions) == 1 else "the chosen Definitions have"
        raise click.UsageError(no_kernel_named(kernel_label, who, kernels, definitions))
    return tasks


def _tasks_of(definition: Definition, root: Path, against: str, kernel_label: str | None) -> list[Task]:
    target = kernel_label or ("kernel" if against == "kernel" else "oracle")
    try:
        family = family_of(definition)
        # A file outside the dataset is verified as it is.
        outside = definition.root is None and definition.path is not None
        stale = "" if outside else outdated_reference(definition.root or root, definition) or ""
        broken = unfinished(family)
    except Exception as error:  # a family module is Python code of contributors
        return [Task(definition, None, target, broken=error_line(error, definition))]
    if broken:
        return [Task(definition, family, target, broken=broken)]
    tasks = []
    if against in ("oracle", "all"):
        tasks.append(Task(definition, family, "oracle", stale=stale))
    if against in ("kernel", "all"):
        kernels: Sequence[Kernel] = family.kernels_of(definition)
        if kernel_label is not None:
            kernels = kernels_named(kernel_label, kernels)
        tasks += [Task(definition, family, kernel.label, kernel, stale=stale) for kernel in kernels]
    return tasks


def refusals(definitions: Sequence[Definition]) -> Iterator[str]:
    """A line for each kernel of their families that does not compute a Definition, with the reason."""
    for definition in definitions:
        for kernel in family_of(definition).kernels:
            if reason := kernel.unsupported(definition):
                yield f"{definition.name}: {kernel.label}: {reason}"


def unfinished(family: Family) -> str:
    """A message with the first `TODO` that a scaffold left in the modules of a record; empty if there is none."""
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
    for function in (family.make_inputs, family.oracle):
        code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
        if code is not None:
            yield Path(code.co_filename)


def error_line(error: Exception, definition: Definition) -> str:
    """One line for an error outside a case: the file, what is wrong and the fix, instead of a traceback."""
    text = error_place(error)
    if is_ours(error):
        return f"{definition.path}: {text}" if text.startswith(f"{definition.name}:") else text
    return f"{text}; correct it, then run `flashinfer-trace verify {definition.name}` again"


def error_place(error: Exception) -> str:
    """File, line and message of an error, in one line; only the message of an error of this package."""
    text = " ".join(str(error).split())
    if is_ours(error):
        return text
    if isinstance(error, SyntaxError) and error.filename:
        place, text = f"{error.filename}:{error.lineno}", error.msg
    else:
        # The innermost line in the records, which contributors write; else in the package; else anywhere.
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        records = [frame for frame in frames if any(map(Path(frame.filename).is_relative_to, families.__path__))]
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(store.PACKAGE)]
        frame = (records or ours or frames)[0]
        place = f"{frame.filename}:{frame.lineno}"
    return f"{place}: {type(error).__name__}: {text}"
