"""After how many cases a verification rejects a kernel with a known fault, and the record of it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.files import write_json
from flashinfer_trace.harness.case import CaseResult, evaluate, kernel_outputs, reference_outputs
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs
from flashinfer_trace.harness.faults import Fault, FaultyCase, any_kernel
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.verify import Job, verify
from flashinfer_trace.verdict.compare import Expected
from flashinfer_trace.verdict.tensors import torch_dtype


@dataclasses.dataclass
class Power:
    """The result of a verification for one fault.

    Attributes:
        applied: cases in which the faulty kernel's outputs differed.
        cases: how many cases it took until the kernel was rejected; None if none of them rejected it.
    """

    applied: int = 0
    cases: int | None = None


def faults_of(definition: Definition, family: Family) -> tuple[Fault, ...]:
    """The faults of any kernel of this Definition, and those that its family declares."""
    outputs = {name: (torch_dtype(spec.dtype), len(spec.shape or ())) for name, spec in definition.outputs.items()}
    return (*any_kernel(outputs), *family.faults)


def stand_in(kernel: Kernel | None) -> Kernel:
    """A kernel that is judged as this one is, but computed by the reference: where the real one cannot run."""

    def call(definition: Definition, inputs: Inputs, outputs: Outputs) -> Outputs:
        return reference_outputs(definition, inputs, 0)

    return dataclasses.replace(kernel or Kernel("reference", call), call=call, in_place=(), seeded=None)


def power(job: Job, examples: int, seed: int = 0) -> dict[str, Power]:
    """Verifies a kernel, then spoils each of its cases, in the same order, until every fault was rejected.

    Args:
        job: with a kernel.
        examples: real cases in addition to the corners.
        seed: of the verification.

    Raises:
        ValueError: the kernel does not pass as it is.
    """
    assert job.kernel is not None
    cases: list[CaseResult] = []
    report = verify(job, examples=examples, seed=seed, on_case=lambda _, result: cases.append(result))
    if report.status != "passed":
        raise ValueError(f"{job.definition.name}: {job.kernel.label} does not pass as it is: {report.message}")
    faults = faults_of(job.sized, job.family)
    found = {fault.name: Power() for fault in faults}
    for number, case in enumerate(cases, 1):
        remaining = [fault for fault in faults if found[fault.name].cases is None]
        if not remaining:
            break
        trial = _trial(job, job.kernel, case, number)
        for fault in remaining:
            outputs = fault.spoil(trial)
            if outputs is None:
                continue
            found[fault.name].applied += 1
            if _rejects(job, trial.inputs, trial.expected, outputs):
                found[fault.name].cases = number
    return found


def _trial(job: Job, kernel: Kernel, case: CaseResult, number: int) -> FaultyCase:
    definition, family = job.sized, job.family
    inputs = family.inputs(definition, case.plan, case.seed, job.device)
    other = family.inputs(definition, case.plan, case.seed + 1, job.device)

    def run(given: Mapping[str, Any]) -> Outputs:
        return kernel_outputs(definition, kernel, given)[0]

    return FaultyCase(inputs, other, family.expected(definition, inputs), run, Draws(number, "cpu"))


def _rejects(
    job: Job, inputs: Mapping[str, Any], expected: Mapping[str, Expected], outputs: dict[str, torch.Tensor]
) -> bool:
    """Whether the judge of a case, which knows nothing of faults, refuses these outputs."""
    comparisons = evaluate(job.family.policies(job.kernel), outputs, expected)
    if not all(comparison.passed for comparison in comparisons.values()):
        return True
    return bool(job.family.unrelated(job.sized, inputs, outputs))


def unexplained(family: Family, found: Mapping[str, Power]) -> list[str]:
    """The faults that no case rejected although some showed them, and for which the family declares no reason."""
    return [
        f"{name} (in {power.applied} cases)"
        for name, power in found.items()
        if power.applied and power.cases is None and not family.why_unseen(name)
    ]


def record_power(directory: Path, job: Job, examples: int, seed: int, found: Mapping[str, Power]) -> Path:
    """Writes what was found of a real kernel into ``<family>.<kernel>.json``, replacing an older record."""
    assert job.kernel is not None
    label = re.sub(r"[^A-Za-z0-9]+", "_", job.kernel.label).strip("_")[:120]
    path = directory / f"{job.family.name}.{label}.json"
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "family": job.family.name,
        "definition": job.definition.name,
        "kernel": job.kernel.label,
        "gpu": torch.cuda.get_device_name(torch.device(job.device)),
        "torch": torch.__version__,
        "examples": examples,
        "seed": seed,
        "faults": {name: dataclasses.asdict(power) for name, power in found.items()},
    }
    write_json(path, document)
    return path
