"""One case: inputs -> reference, oracle and, if asked, a real kernel -> what each output was worth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from flashinfer_trace.format.definition import Definition
from flashinfer_trace.format.precision import full_precision_products
from flashinfer_trace.harness.family import Family, Inputs, Kernel, Outputs, Plan, ReferenceRun
from flashinfer_trace.harness.far import far_rows
from flashinfer_trace.harness.inputs import clone_inputs
from flashinfer_trace.harness.layouts import FAR, LAYOUT
from flashinfer_trace.sandbox.far_rows import FarRows
from flashinfer_trace.sandbox.ownership import aliased, not_owned
from flashinfer_trace.sandbox.state import numbers_drawn
from flashinfer_trace.sandbox.worker import ReferenceWorker
from flashinfer_trace.verdict.compare import Comparison, Expected, Policy
from flashinfer_trace.verdict.judgment import describe, evaluate, less_accurate_reference, vacuity
from flashinfer_trace.verdict.outputs import misfits, numbers_as_tensors, poison_allocator, poisoned_outputs
from flashinfer_trace.verdict.tensors import device_of, differing

__all__ = [
    "CaseResult",
    "SharedCase",
    "device_of",
    "evaluate",
    "judge_reference",
    "poisoned_outputs",
    "reference_outputs",
    "run_case",
    "shared_case",
    "vacuity",
]


@dataclass
class CaseResult:
    """The result of one case.

    Attributes:
        plan, seed: repeat it.
        axes: values of the variable axes.
        reference, kernel: comparison of each output with the oracle.
        vacuous: why the case proves nothing, or an empty string.
        failures: one line each; empty if the case passed.
    """

    plan: Plan
    seed: int
    axes: dict[str, int]
    reference: dict[str, Comparison] = field(default_factory=dict)
    kernel: dict[str, Comparison] = field(default_factory=dict)
    vacuous: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SharedCase:
    """Shared by all targets of one case: inputs, the oracle's results, the reference's outputs and their comparison.

    Attributes:
        actual: the reference's outputs.
        reference: comparison of each with the oracle; empty if they do not fit the Definition.
        failures: of the reference, one line each.
        copies: inputs for kernels to work on; one that a kernel may have changed is replaced before the next kernel.
    """

    definition: Definition
    family: Family
    plan: Plan
    seed: int
    inputs: Inputs
    axes: dict[str, int]
    expected: dict[str, Expected]
    actual: Outputs
    reference: dict[str, Comparison]
    failures: list[str]
    copies: Inputs = field(default_factory=dict)

    @torch.no_grad()
    def result(self, kernel: Kernel | None) -> CaseResult:
        """The result of the case for the reference alone, or for a kernel as well.

        A kernel must meet its own policies, leave every input alone that it does not declare in place, and (where
        errors can be measured) must not be closer to the oracle than the reference.
        """
        definition, policies = self.definition, self.family.policies(kernel)
        result = CaseResult(self.plan, self.seed, self.axes, self.reference, failures=[*self.failures])
        if kernel is not None and self.reference:
            self._compare(kernel, policies, result)
        # Last, because a comparison finds along the way what this asks for.
        result.vacuous = vacuity(definition, self.expected, policies)
        return result

    def _compare(self, kernel: Kernel, policies: Mapping[str, Policy], result: CaseResult) -> None:
        """Runs a kernel, and adds what it showed to the result."""
        definition = self.definition
        far = far_rows(definition) if self.plan.get(LAYOUT) == FAR else None
        outputs, failures = kernel_outputs(definition, kernel, self.inputs, self.copies, self.seed, far)
        result.failures += failures
        wrong = misfits(definition, self.axes, outputs, device_of(self.inputs))
        if wrong:
            result.failures += [f"{kernel.label}: {line}" for line in wrong]
            return
        result.kernel = evaluate(policies, outputs, self.expected)
        result.failures += describe(kernel.label, result.kernel, policies)
        result.failures += unrelated(kernel.label, self.family, definition, self.inputs, outputs, result.kernel)
        pairs = {name: (self.reference[name], comparison) for name, comparison in result.kernel.items()}
        result.failures += less_accurate_reference(pairs, self.expected, self.actual, outputs)


@torch.no_grad()
def shared_case(
    definition: Definition,
    family: Family,
    plan: Plan,
    seed: int,
    device: str | torch.device,
    worker: ReferenceWorker | None = None,
) -> SharedCase:
    """Makes the inputs of one case on `device`, and judges the reference, which runs in `worker` if there is one."""
    inputs, axes = family.inputs_and_axes(definition, plan, seed, device)
    expected = family.expected(definition, inputs)
    actual, reference, failures = judge_reference(definition, family, inputs, axes, expected, seed, worker)
    return SharedCase(definition, family, plan, seed, inputs, axes, expected, actual, reference, failures)


def run_case(
    definition: Definition,
    family: Family,
    plan: Plan,
    seed: int,
    device: str | torch.device,
    kernel: Kernel | None = None,
    worker: ReferenceWorker | None = None,
) -> CaseResult:
    """Runs one case of one target on `device`, the reference in `worker` if there is one: see `SharedCase.result`."""
    return shared_case(definition, family, plan, seed, device, worker).result(kernel)


def judge_reference(
    definition: Definition,
    family: Family,
    inputs: Mapping[str, Any],
    axes: Mapping[str, int],
    expected: Mapping[str, Expected],
    seed: int,
    worker: ReferenceWorker | None = None,
) -> tuple[Outputs, dict[str, Comparison], list[str]]:
    """Runs the embedded reference once: its outputs, the comparison of each with the oracle, and a line per failure.

    Outputs that do not fit the Definition are not compared.
    """
    actual = reference_outputs(definition, inputs, seed, worker)
    wrong = misfits(definition, axes, actual, device_of(inputs)) or not_owned(actual, inputs)
    if wrong:
        return actual, {}, [f"reference: {line}" for line in wrong]
    comparisons = evaluate(family.policies(), actual, expected)
    failures = describe("reference", comparisons, family.policies())
    failures += unrelated("reference", family, definition, inputs, actual, comparisons)
    return actual, comparisons, failures


def reference_outputs(
    definition: Definition,
    inputs: Mapping[str, Any],
    seed: int,
    worker: ReferenceWorker | None = None,
    uniform: torch.Tensor | None = None,
) -> Outputs:
    """The embedded reference's outputs, with full-precision products; a sampler draws from a generator seeded here.

    It runs in `worker`, which takes inputs on the CPU. Without one it runs in this process, which is for references
    that were read by somebody, and for those on a GPU. `uniform` are the numbers that torch.rand returns, if not those
    of the generator.

    Raises:
        ReferenceFailed: in the worker it gave no outputs, or did what no reference may do.
        AssertionError: it returned neither a tensor nor a tuple, or changed an input.
        InputError: it returned another number of results than the Definition has outputs.
    """
    if worker is not None:
        return numbers_as_tensors(definition, worker.run(definition, inputs, seed, uniform), device_of(inputs))
    versions = {name: value._version for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    with deterministic_draws(seed), numbers_drawn(uniform), full_precision_products(), torch.no_grad():
        returned = definition.compiled(*(inputs[name] for name in definition.inputs))
    if isinstance(returned, (list, dict)):
        raise AssertionError(
            f"{definition.name}: run() returned a {type(returned).__name__}; it must return a tensor, or a tuple of "
            f"tensors in the order of {list(definition.outputs)}"
        )
    outputs = numbers_as_tensors(definition, definition.name_outputs(returned), device_of(inputs))
    # torch counts writes to a tensor, and references write with torch only: no copy is needed, unlike for kernels.
    changed = [name for name, version in versions.items() if inputs[name]._version != version]
    if changed:
        raise AssertionError(
            f"{definition.name}: the reference changed its inputs {changed}; it must not write to them"
        )
    return outputs


def reference_run(worker: ReferenceWorker | None = None) -> ReferenceRun:
    """The function with which a family's `checks` run references: see `reference_outputs`."""

    def run(definition: Definition, inputs: Mapping[str, Any], uniform: torch.Tensor | None = None) -> Outputs:
        return reference_outputs(definition, inputs, 0, worker, uniform)

    return run


def kernel_outputs(
    definition: Definition,
    kernel: Kernel,
    inputs: Mapping[str, Any],
    copies: Inputs | None = None,
    seed: int = 0,
    far: FarRows | None = None,
) -> tuple[Outputs, list[str]]:
    """Outputs of a kernel on copies of the inputs, into poisoned memory, and a line for each input that it spoiled or
    returned as an output, without declaring it in place.

    `copies` are those that earlier kernels left unchanged, by name; those that this one leaves are put there. `seed` is
    that of `poisoned_outputs`. With rows `far` behind others, those before them are never copied, nor compared.
    """
    known = {} if copies is None or far is not None else copies
    own = {**clone_inputs({name: value for name, value in inputs.items() if name not in known}), **known}
    own = {name: own[name] for name in inputs}
    kept = {name: value for name, value in own.items() if name not in kernel.in_place}
    known.clear()
    poisoned = poisoned_outputs(definition, inputs, seed)
    if far is None:
        poison_allocator(poisoned)
    else:
        inputs, own, poisoned = far.moved(inputs), far.given(own), far.filled(poisoned)
        kept = far.own({name: own[name] for name in kept}, far.inputs)
    # It is not waited for: what it leaves to do on another stream is not done when its outputs are compared, and shows.
    outputs = numbers_as_tensors(definition, kernel.call(definition, own, poisoned), device_of(inputs))
    outputs = outputs if far is None else far.own(outputs, far.outputs)
    spoiled = differing(kept, inputs, kept)
    lines = [f"{kernel.label} changed input {name}, which it does not declare in place" for name in spoiled]
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    lines += [f"{kernel.label}: {line}, which it does not declare in place" for line in aliased(tensors, kept)]
    if not lines:
        known.update(kept)
    return outputs, lines


def unrelated(
    who: str,
    family: Family,
    definition: Definition,
    inputs: Mapping[str, Any],
    outputs: Outputs,
    comparisons: Mapping[str, Comparison],
) -> list[str]:
    """One line for each way in which outputs that pass one by one do not fit each other."""
    if not all(comparison.passed for comparison in comparisons.values()):
        return []
    return [f"{who}: {line}" for line in family.unrelated(definition, inputs, outputs)]


@contextmanager
def deterministic_draws(seed: int) -> Iterator[None]:
    """Seeds torch's default generators of the CPU and of each GPU for a sampling reference, and puts them back.

    `torch.random.fork_rng` and `torch.manual_seed` do so for every kind of device, which takes longer than most cases.
    """
    generators = [torch.default_generator, *torch.cuda.default_generators]
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
