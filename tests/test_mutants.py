"""Every policy, of references and of kernels, rejects every applicable mutant of a correct output.

A verification rejects every kernel with a fault, in a number of cases that the GPU runs record.
"""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import pytest
import torch
from gpu_libraries import skip_unusable
from hypothesis import strategies as st
from whole_dataset import FAMILIES, MEMBERS

from flashinfer_trace.harness.case import evaluate, reference_outputs, vacuity
from flashinfer_trace.harness.family import PlanRequest
from flashinfer_trace.harness.layouts import LAYOUT, NAN_ROW
from flashinfer_trace.harness.power import power, record_power, stand_in, unexplained
from flashinfer_trace.harness.verify import Job, prepare
from flashinfer_trace.verdict.unordered import Multiset
from flashinfer_trace.verdict.wrong_outputs import ANY_OUTPUT, MUTANTS, ONE_PER_CENT_TOO_LARGE

#: One Definition of each family: their twins are mostly alike. The first may choose only one element of a row, where
#: many mutants change nothing.
LAST = {name: members[-1] for name, members in MEMBERS.items()}
CASES = 16
OF_SOME_SORTS = ("stale", "one row written twice")
#: At real sizes, where a case may take a second.
REAL_CASES = 4
#: Cases besides the corners in which a faulty kernel must be found.
FAULTY_CASES = 4
REAL_FAULTY_CASES = 10


class Cases:
    """Cases of a family's twin, on a GPU of the Definition itself. Each part of a case is computed when it is needed.

    Attributes:
        drawn: (plan, seed) of each, more than are needed: some prove nothing.
    """

    def __init__(self, name, device="cpu", count=CASES, kernel=None):
        self.family, self.device = FAMILIES[name], device
        self.definition = prepare(LAST[name], self.family, device, full=False)
        limits, options = (kernel.limits, kernel.plan_options) if kernel else ({}, None)
        plans = self.family.plans(PlanRequest(self.definition, limits, device != "cpu", options))
        self.drawn = []

        @hypothesis.settings(max_examples=4 * count, database=None, deadline=None, phases=[hypothesis.Phase.generate])
        @hypothesis.seed(7)
        @hypothesis.given(plans, st.integers(0, 2**31 - 1))
        def collect(plan, seed):
            if plan.get(LAYOUT) != NAN_ROW:  # a mutant may be wrong in no other row than the one that may be anything
                self.drawn.append((plan, seed))

        collect()
        self.expected = functools.cache(self._expected)
        self.outputs = functools.cache(self._outputs)

    def _expected(self, number):
        plan, seed = self.drawn[number]
        return self.family.oracle(self.definition, self.family.inputs(self.definition, plan, seed, self.device))

    def _outputs(self, number):
        """Outputs of the reference, for the elements of the case and for others."""
        plan, seed = self.drawn[number]
        inputs = [self.family.inputs(self.definition, plan, seed + other, self.device) for other in (0, 1)]
        return [reference_outputs(self.definition, given, seed + other) for other, given in enumerate(inputs)]

    def real(self, policies, count=CASES):
        """The first `count` cases that prove something: (plan, outputs, outputs for other elements, expected)."""
        found = []
        for number, (plan, _) in enumerate(self.drawn):
            if len(found) < count and not vacuity(self.definition, self.expected(number), policies):
                found.append((plan, *self.outputs(number), self.expected(number)))
        return found


#: The targets of a family are neighbors and have the same cases.
cases_of = functools.lru_cache(maxsize=1)(Cases)


@functools.lru_cache(maxsize=1)
def remembering(name):
    """A family that makes the inputs of a case, and its oracle's results, once for all kernels."""
    family, made, found = FAMILIES[name], {}, {}

    def make_inputs(definition, plan, draws):
        key = repr((sorted(plan.items()), draws._seed))
        made[key] = made.get(key) or family.make_inputs(definition, plan, draws)
        return dict(made[key])

    def oracle(definition, inputs):
        key = tuple(map(id, inputs.values()))  # of tensors that are kept with what was found
        found[key] = found.get(key) or (inputs, family.oracle(definition, inputs))
        return found[key][1]

    return dataclasses.replace(family, make_inputs=make_inputs, oracle=oracle)


def applies(mutant, output, policy):
    """Integers have no NaN; one per cent is less than a rounding to fp8; a single number cannot change places; another
    sort of the same rows is not stale, and a group may have one row only."""
    if isinstance(policy, Multiset) and mutant.name in OF_SOME_SORTS:
        return False
    if output.numel() == 1 and mutant in MUTANTS and mutant not in ANY_OUTPUT:
        return False
    if not output.is_floating_point():
        return not mutant.floating_only
    return mutant is not ONE_PER_CENT_TOO_LARGE or torch.finfo(output.dtype).bits > 8


def zeros_only(mutated, right):
    """Whether codes differ in the sign of zeros alone, which says nothing."""
    codes = mutated.dtype == torch.float8_e4m3fn and mutated.shape == right.shape
    return codes and torch.equal(mutated.float(), right.float())


def accepted_mutants(cases, policies):
    """The mutants of the cases' outputs that a policy lets pass; (output, mutant) of those that apply, and of all."""
    accepted, applied, declared = [], set(), set()
    for plan, outputs, other, expected in cases:
        assert all(c.passed for c in evaluate(policies, outputs, expected).values()), "the correct output fails"
        for name, want in expected.items():
            for mutant in policies[name].mutants(want):
                if applies(mutant, outputs[name], policies[name]):
                    declared.add((name, mutant.name))
                mutated = mutant.applied(outputs[name], other[name])
                if mutated is None or zeros_only(mutated, outputs[name]):
                    continue
                applied.add((name, mutant.name))
                if policies[name].compare(mutated, want).passed:
                    accepted.append(f"{name}, {mutant.name}, plan {plan}")
    return accepted, applied, declared


TARGETS = [
    pytest.param(family, kernel, id=f"{family.name}-{kernel.label if kernel else 'reference'}")
    for family in FAMILIES.values()
    for kernel in (None, *[kernel for kernel in family.kernels if kernel.compare])
]


@pytest.mark.parametrize(("family", "kernel"), TARGETS)
def test_policies_reject_every_mutant(family, kernel):
    policies = family.policies(kernel)
    cases = cases_of(family.name).real(policies)
    assert len(cases) >= CASES // 2, "too few real cases to judge the policies by"
    accepted, applied, declared = accepted_mutants(cases, policies)
    assert {name for name, _ in declared} == set(policies), "an output has no mutants"
    assert not declared - applied, f"no case applied the mutants {declared - applied}"
    assert not accepted, "accepted:\n" + "\n".join(accepted)


@pytest.mark.gpu_harness
@pytest.mark.parametrize(("family", "kernel"), TARGETS)
def test_policies_reject_every_mutant_at_real_sizes(family, kernel, cuda_device):
    """Bounds grow with the lengths of sums: what they reject of a small twin, they must reject of the real thing."""
    policies = family.policies(kernel)
    cases = Cases(family.name, cuda_device, REAL_CASES, kernel).real(policies, REAL_CASES)
    assert cases, "no real case to judge the policies by"
    accepted, applied, _ = accepted_mutants(cases, policies)
    assert applied
    assert not accepted, "accepted:\n" + "\n".join(accepted)


@pytest.mark.parametrize(("family", "kernel"), TARGETS)
def test_a_verification_rejects_every_faulty_kernel(family, kernel):
    """Here the reference replaces the kernel, at the sizes of the small twin."""
    found = power(Job(LAST[family.name], remembering(family.name), stand_in(kernel)), FAULTY_CASES)
    assert any(fault.applied for fault in found.values())
    assert not unexplained(family, found)


#: Each real kernel with the first Definition of its family that it computes, and that has two experts to exchange.
REAL_TARGETS = [
    pytest.param(family, kernel, definition, id=f"{family.name}-{kernel.label}")
    for family in FAMILIES.values()
    for kernel in family.kernels
    for definition in [
        d
        for d in MEMBERS[family.name]
        if kernel.unsupported(d) is None and d.const_axes.get("num_local_experts", 2) > 1
    ][:1]
]


def test_every_family_has_a_real_kernel_to_spoil():
    assert {target.values[0].name for target in REAL_TARGETS} == set(FAMILIES)


@pytest.mark.gpu_harness
@pytest.mark.parametrize(("family", "kernel", "definition"), REAL_TARGETS)
def test_a_verification_rejects_every_faulty_real_kernel(family, kernel, definition, cuda_device, request):
    """At real sizes; --record-power writes the numbers of cases."""
    skip_unusable(kernel, torch.cuda.get_device_capability(cuda_device), request.config.getoption("--require-gpu"))
    job, seed = Job(definition, family, kernel, cuda_device), request.config.getoption("--seed")
    found = power(job, REAL_FAULTY_CASES, seed)
    directory = request.config.getoption("--record-power")
    if directory:
        record_power(directory, job, REAL_FAULTY_CASES, seed, found)
    torch.cuda.empty_cache()
    assert not unexplained(family, found)
