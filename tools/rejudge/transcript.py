"""Verdicts of one checkout on references, kernels, mutants and faulty kernels: every verdict, every figure.

`__main__` calls `main` of this file by its path, to judge with the package of any checkout on PYTHONPATH. This file
imports nothing of tools/, which that checkout may lack.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flashinfer_trace import definitions
from flashinfer_trace.families import all_families, family_of
from flashinfer_trace.harness import binding
from flashinfer_trace.harness.case import evaluate, reference_outputs, shared_case
from flashinfer_trace.harness.cases import cases
from flashinfer_trace.harness.family import Family
from flashinfer_trace.harness.faults import FaultyCase
from flashinfer_trace.harness.inputs import Draws
from flashinfer_trace.harness.job import Job
from flashinfer_trace.harness.plans import input_bytes
from flashinfer_trace.harness.power import faults_of, stand_in

#: Cases of each family in addition to the corners, and how many of all are also judged with faults and mutants.
CASES, SPOILED = 6, 8


def first_output(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """A kernel that answers as the reference does, but for its first output."""

    def call(definition: Any, inputs: Any, outputs: Any) -> Any:
        found = reference_outputs(definition, inputs, 0)
        name = next(iter(found))
        return {**found, name: change(found[name])}

    return call


def writes_inputs(definition: Any, inputs: Any, outputs: Any) -> Any:
    found = reference_outputs(definition, {name: keep(value) for name, value in inputs.items()}, 0)
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.numel():
            value[(0,) * value.ndim].view(1).view(torch.uint8).bitwise_xor_(1)  # also where rows lie apart
            break
    return found


def returns_an_input(definition: Any, inputs: Any, outputs: Any) -> Any:
    found = reference_outputs(definition, {name: keep(value) for name, value in inputs.items()}, 0)
    given = next(value for value in inputs.values() if isinstance(value, torch.Tensor))
    return {**found, next(iter(found)): given}


def keep(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


#: Kernels that are wrong in what no output shows, or that show nothing: the harness itself must refuse each.
WRONG: dict[str, Callable[..., Any]] = {
    "right": lambda definition, inputs, outputs: reference_outputs(definition, inputs, 0),
    "writes nothing": lambda definition, inputs, outputs: outputs,
    "forgets an output": lambda definition, inputs, outputs: dict(
        list(reference_outputs(definition, inputs, 0).items())[1:]
    ),
    "another dtype": first_output(lambda value: value.double() if value.is_floating_point() else value.to(torch.int8)),
    "another shape": first_output(lambda value: value.unsqueeze(0)),
    "zeros": first_output(torch.zeros_like),
    "writes inputs": writes_inputs,
    "returns an input": returns_an_input,
}


def figures(comparisons: Any) -> dict[str, Any]:
    """Every figure of some comparisons; texts are left out."""
    return {
        name: [repr(value) for value in (one.passed, one.ratio, one.error, one.index, one.actual, one.bound)]
        for name, one in comparisons.items()
    }


def judged(job: Job) -> Iterator[tuple[str, Any]]:
    """The verdict on each case of a family, with whom it is about: a kernel's label, or "reference"."""
    found = 0

    def missing() -> int:
        return CASES - found

    for number, case in enumerate(cases(job, 0, missing)):
        found += case.kind == "drawn"
        shared = shared_case(job.sized, job.family, case.plan, case.seed, "cpu")
        spoiled = spoil(job, shared, number) if number < SPOILED else {}
        for kernel in (None, *job.family.kernels):
            label = kernel.label if kernel else "reference"
            for what, call in WRONG.items():
                result = shared.result(dataclasses.replace(stand_in(kernel), call=call))
                said = [bool(result.vacuous), bool(result.failures), figures(result.reference), figures(result.kernel)]
                yield label, [number, what, case.plan, case.seed, *said]
            policies = job.family.policies(kernel)
            for what, outputs in {**spoiled, **mutated(shared, policies, spoiled)}.items():
                unrelated = len(job.family.unrelated(job.sized, shared.inputs, outputs))
                yield label, [number, what, figures(evaluate(policies, outputs, shared.expected)), unrelated]


def spoil(job: Job, shared: Any, number: int) -> dict[str, Any]:
    """The outputs of the reference, those for other elements, and what each fault makes of them."""
    other = job.family.inputs(job.sized, shared.plan, shared.seed + 1, "cpu")

    def run(given: Any) -> Any:
        return reference_outputs(job.sized, given, 0)

    trial = FaultyCase(shared.inputs, other, shared.expected, run, Draws(number, "cpu"))
    faulty = {fault.name: fault.spoil(trial) for fault in faults_of(job.sized, job.family)}
    found = {what: outputs for what, outputs in faulty.items() if outputs is not None}
    return {"as it is": trial.outputs, "of other elements": trial.before, **found}


def mutated(shared: Any, policies: Any, spoiled: dict[str, Any]) -> dict[str, Any]:
    """The mutants of each output by themselves."""
    found = {}
    for name, want in shared.expected.items() if spoiled else ():
        for mutant in policies[name].mutants(want):
            outputs, other = spoiled["as it is"], spoiled["of other elements"]
            value = mutant.applied(outputs[name], other[name])
            if value is not None:
                found[f"{name} {mutant.name}"] = {**outputs, name: value}
    return found


def transcript(family: Family, definition: Any) -> dict[str, Any]:
    """For each kernel, a digest of its verdicts, and digests of the code that judges it."""
    said: dict[str, Any] = {}
    lines = 0
    for label, line in judged(Job(definition, family)):
        said.setdefault(label, hashlib.sha256()).update(json.dumps(line, sort_keys=True, default=repr).encode())
        lines += 1
    return {
        "lines": lines,
        "said": {label: one.hexdigest() for label, one in said.items()},
        "code": {kernel.label: binding.judging_code(family, kernel) for kernel in family.kernels},
        # A GPU alone runs what calls a kernel: it must be the same, with all that it uses.
        "adapters": {one.label: binding.Closure(one.call, one.in_place, one.seeded).sha256 for one in family.kernels},
    }


def main() -> None:
    """Writes the transcripts of families (the further arguments, or all) into a file (the first)."""
    torch.set_num_threads(1)
    path, names = Path(sys.argv[1]), sys.argv[2:]
    smallest: dict[str, Any] = {}
    for one in sorted(definitions(), key=lambda one: (input_bytes(one), one.name)):
        smallest.setdefault(family_of(one).name, one)
    wanted = [family for family in all_families() if family.name in smallest and (not names or family.name in names)]
    path.write_text(json.dumps({family.name: transcript(family, smallest[family.name]) for family in wanted}))
