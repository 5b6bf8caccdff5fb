"""One case: inputs -> reference, oracle and, if asked, a real kernel -> what each output was worth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from flashinfer_trace.definition import Definition
from flashinfer_trace.harness.compare import Comparison, Expected, Policy, correctly_rounded, norm_error, unit_roundoff
from flashinfer_trace.harness.family import Family, Kernel, Outputs, Plan
from flashinfer_trace.harness.inputs import clone_inputs, torch_dtype
from flashinfer_trace.harness.outputs import misfits, numbers_as_tensors
from flashinfer_trace.isolation.ownership import aliased, not_owned
from flashinfer_trace.isolation.worker import ReferenceWorker

__all__ = ["CaseResult", "evaluate", "judge_reference", "poisoned_outputs", "reference_outputs", "run_case"]

#: A reference may be worse than a kernel by this factor before it counts as less accurate: two correctly rounded
#: results of one value differ by as much in their Frobenius norm.
CLOSENESS = 1.05


@dataclass
class CaseResult:
    """What one case showed.

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


def run_case(
    definition: Definition,
    family: Family,
    plan: Plan,
    seed: int,
    device: str | torch.device,
    kernel: Kernel | None = None,
    worker: ReferenceWorker | None = None,
) -> CaseResult:
    """Runs one case on `device`, the reference in `worker` if there is one.

    The reference must meet the family's policies; a kernel must meet its own, leave every input alone that it does not
    declare in place, and (where errors can be measured) must not be closer to the oracle than the reference.
    """
    inputs, axes = family.inputs_and_axes(definition, plan, seed, device)
    result = CaseResult(plan, seed, axes)
    expected = family.expected(definition, inputs)
    policies = family.policies(kernel)
    result.vacuous = vacuity(definition, expected, {**family.policies(), **policies})
    actual, result.reference, result.failures = judge_reference(
        definition, family, inputs, axes, expected, seed, worker
    )
    if kernel is None or not result.reference:
        return result
    outputs, failures = kernel_outputs(definition, kernel, inputs)
    result.failures += failures
    wrong = misfits(definition, axes, outputs, device_of(inputs))
    if wrong:
        result.failures += [f"{kernel.label}: {line}" for line in wrong]
        return result
    result.kernel = evaluate(policies, outputs, expected)
    result.failures += describe(kernel.label, result.kernel, policies)
    result.failures += less_accurate_reference(result, expected, actual)
    return result


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
    return actual, comparisons, describe("reference", comparisons, family.policies())


def reference_outputs(
    definition: Definition, inputs: Mapping[str, Any], seed: int, worker: ReferenceWorker | None = None
) -> Outputs:
    """The embedded reference's outputs, in full float32 products; a sampler draws from a generator seeded here.

    It runs in `worker`, which takes inputs on the CPU. Without one it runs in this process, which is for references
    that were read by somebody, and for those on a GPU.

    Raises:
        ReferenceFailed: in the worker it gave no outputs, or did what no reference may do.
        AssertionError: it returned neither a tensor nor a tuple, or changed an input.
        InputError: it returned another number of results than the Definition has outputs.
    """
    if worker is not None:
        return numbers_as_tensors(definition, worker.run(definition, inputs, seed), device_of(inputs))
    pristine = clone_inputs(dict(inputs))
    with deterministic_draws(seed), full_precision_products(), torch.no_grad():
        returned = definition.compiled(*(inputs[name] for name in definition.inputs))
    if isinstance(returned, (list, dict)):
        raise AssertionError(
            f"{definition.name}: run() returned a {type(returned).__name__}; it must return a tensor, or a tuple of "
            f"tensors in the order of {list(definition.outputs)}"
        )
    outputs = numbers_as_tensors(definition, definition.name_outputs(returned), device_of(inputs))
    changed = [name for name in inputs if not same_bits(inputs[name], pristine[name])]
    if changed:
        raise AssertionError(
            f"{definition.name}: the reference changed its inputs {changed}; it must not write to them"
        )
    return outputs


def kernel_outputs(definition: Definition, kernel: Kernel, inputs: Mapping[str, Any]) -> tuple[Outputs, list[str]]:
    """Outputs of a kernel on copies of the inputs, into poisoned memory, and a line for each input that it spoiled or
    returned as an output, without declaring it in place."""
    own = clone_inputs(dict(inputs))
    poisoned = poisoned_outputs(definition, inputs)
    poison_allocator(poisoned)
    outputs = numbers_as_tensors(definition, kernel.call(definition, own, poisoned), device_of(inputs))
    if device_of(inputs).type == "cuda":
        torch.cuda.synchronize()
    kept = {name: value for name, value in own.items() if name not in kernel.in_place}
    spoiled = [name for name, value in kept.items() if not same_bits(value, inputs[name])]
    lines = [f"{kernel.label} changed input {name}, which it does not declare in place" for name in spoiled]
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    lines += [f"{kernel.label}: {line}, which it does not declare in place" for line in aliased(tensors, kept)]
    return outputs, lines


def device_of(inputs: Mapping[str, Any]) -> torch.device:
    """The device of the input tensors."""
    return next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))


def poisoned_outputs(definition: Definition, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Output tensors full of NaN (integers: their smallest value): an element that is never written shows."""
    shapes = definition.output_shapes(definition.bind_axes(inputs))
    outputs = {}
    for name, shape in shapes.items():
        dtype = torch_dtype(definition.outputs[name].dtype)
        poison = math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
        outputs[name] = torch.full(shape or (), poison, dtype=dtype, device=device_of(inputs))
    return outputs


def poison_allocator(outputs: Mapping[str, torch.Tensor]) -> None:
    """Frees poisoned blocks of the outputs' sizes, so that a kernel that allocates its results likely gets those."""
    blocks = [torch.empty_like(tensor).copy_(tensor) for tensor in outputs.values()]
    del blocks


def evaluate(
    policies: Mapping[str, Policy], actual: Mapping[str, torch.Tensor], expected: Mapping[str, Expected]
) -> dict[str, Comparison]:
    """Each output against the oracle."""
    return {name: policies[name].compare(actual[name], expected[name]) for name in expected}


def vacuity(definition: Definition, expected: Mapping[str, Expected], policies: Mapping[str, Policy]) -> str:
    """Why the case could not fail, or an empty string: an empty output, or one that zeros would pass."""
    for name, want in expected.items():
        zero = policies[name].zero(want, torch_dtype(definition.outputs[name].dtype))
        if not zero.numel():
            return f"{name} is empty"
        if policies[name].compare(zero, want).passed:
            return f"a zero {name} would pass"
    return ""


def describe(who: str, comparisons: Mapping[str, Comparison], policies: Mapping[str, Policy]) -> list[str]:
    """One line for each output that failed, with the reason of its bound."""
    return [
        f"{who}: output {name}: {comparison}; bound: {policies[name].reason}"
        for name, comparison in comparisons.items()
        if not comparison.passed
    ]


def less_accurate_reference(
    result: CaseResult, expected: Mapping[str, Expected], actual: Mapping[str, torch.Tensor]
) -> list[str]:
    """A line for each output in which the kernel is closer to the oracle than the reference."""
    lines = []
    for name, want in expected.items():
        if not want.value.is_floating_point() or want.value.shape != actual[name].shape:
            continue
        best = norm_error(correctly_rounded(want.value, actual[name].dtype), want.value)
        limit = CLOSENESS * max(result.kernel[name].error, best) + 4 * unit_roundoff(torch.float32)
        if result.reference[name].error > limit:
            lines.append(
                f"reference: output {name} is farther from the oracle "
                f"(relative norm {result.reference[name].error:.3g}) "
                f"than the kernel ({result.kernel[name].error:.3g}); compute it in float32 and round once"
            )
    return lines


def same_bits(a: Any, b: Any) -> bool:
    """Bitwise equality, so that NaN in unused memory compares equal to itself."""
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    flat_a, flat_b = a.detach().reshape(-1), b.detach().reshape(-1)
    return torch.equal(flat_a.contiguous().view(torch.uint8), flat_b.contiguous().view(torch.uint8))


@contextmanager
def deterministic_draws(seed: int) -> Iterator[None]:
    """Seeds torch's global generators for a sampling reference and puts them back."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def full_precision_products() -> Iterator[None]:
    """float32 products in float32 on a GPU, never TF32, whatever the process was set to."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
